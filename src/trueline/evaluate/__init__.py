"""Evaluation: questions with known answers, asked of a model or a server, scored and compared."""
