"""The one list of config keys that cannot change the numbers of a forward pass, with the reason.

A key belongs here only if no value of it could change a formula that we compute. Keys that are
inert at one value only (say `pruned_heads: {}`) are in INERT_AT, and any other value is refused.
"""

from collections.abc import Mapping

_TRAINING = "training only: initialisation, dropout or auxiliary losses"
_SAVED_BY_LIBRARY = "written by the library that saved the file; describes software, not the model"
_GENERATION = "a default for generate(); here each request says what it wants"
_TOKENS = "a token id; text handling takes it from the tokenizer's files"
_OUTPUTS = "what a library call returns, not what the model computes"
_HEADS = "for classification or encoder-decoder use of the same library"

HARMLESS: Mapping[str, str] = {
    # training
    "attention_dropout": _TRAINING,
    "embedding_dropout": _TRAINING,
    "initializer_range": _TRAINING,
    "mtp_loss_scaling_factor": _TRAINING,
    "output_dropout": _TRAINING,
    "aux_loss_alpha": _TRAINING,
    "seq_aux": _TRAINING,
    "router_aux_loss_coef": _TRAINING,
    "router_jitter_noise": _TRAINING,
    "gradient_checkpointing": _TRAINING,
    "pretraining_tp": "how the weights were split while training; the result is the same",
    "ep_size": "how experts were spread while training; the sum is the same",
    # bookkeeping
    "_name_or_path": _SAVED_BY_LIBRARY,
    "_attn_implementation_autoset": _SAVED_BY_LIBRARY,
    "auto_map": _SAVED_BY_LIBRARY,
    "transformers_version": _SAVED_BY_LIBRARY,
    "torchscript": _SAVED_BY_LIBRARY,
    "use_bfloat16": _SAVED_BY_LIBRARY,
    "use_cache": _SAVED_BY_LIBRARY,
    "tf_legacy_loss": _SAVED_BY_LIBRARY,
    "chunk_size_feed_forward": "splits a GEMM over tokens; the result is the same",
    "head_dim": "transformers writes qk_rope_head_dim here; latent attention has its own widths",
    # outputs
    "output_attentions": _OUTPUTS,
    "output_hidden_states": _OUTPUTS,
    "output_router_logits": _OUTPUTS,
    "return_dict": _OUTPUTS,
    # tokens
    "bos_token_id": _TOKENS,
    "pad_token_id": _TOKENS,
    "sep_token_id": _TOKENS,
    "decoder_start_token_id": _TOKENS,
    "tokenizer_class": _TOKENS,
    "prefix": _TOKENS,
    # other heads of the same library
    "finetuning_task": _HEADS,
    "id2label": _HEADS,
    "label2id": _HEADS,
    "problem_type": _HEADS,
    "task_specific_params": _HEADS,
    "cross_attention_hidden_size": _HEADS,
    "tie_encoder_decoder": _HEADS,
    # generate()
    **dict.fromkeys(
        (
            "bad_words_ids",
            "begin_suppress_tokens",
            "diversity_penalty",
            "do_sample",
            "early_stopping",
            "encoder_no_repeat_ngram_size",
            "exponential_decay_length_penalty",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "length_penalty",
            "max_length",
            "min_length",
            "no_repeat_ngram_size",
            "num_beam_groups",
            "num_beams",
            "num_return_sequences",
            "output_scores",
            "remove_invalid_values",
            "repetition_penalty",
            "return_dict_in_generate",
            "suppress_tokens",
            "temperature",
            "top_k",
            "top_p",
            "typical_p",
        ),
        _GENERATION,
    ),
}

INERT_AT: Mapping[str, tuple[object, str]] = {
    "pruned_heads": ({}, "pruned heads would change the weights' shapes"),
    "add_cross_attention": (False, "decoder-only models are supported"),
    "is_encoder_decoder": (False, "decoder-only models are supported"),
    "is_decoder": (False, "decoder-only models are supported"),
    "attention_bias": (False, "no published checkpoint of this family has projection biases"),
    "mlp_bias": (False, "no published checkpoint of this family has projection biases"),
    "hidden_act": ("silu", "every published checkpoint of this family uses silu"),
}
