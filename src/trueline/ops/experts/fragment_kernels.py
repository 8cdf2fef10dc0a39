# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Fragments (fragments.py) as operands of MMAs, in registers: codes become bfloat16, which has all
of them exactly, or, times their scales, are each rounded once.

A fragment's columns are in an order of their own, which x has to share: of 32 columns, number
8 q + 4 j + 2 h + e stands at 16 j + 8 h + 2 q + e."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
# Of a word, $8, nibbles n and n + 4 become two bfloat16 numbers. int4: or-ed into the fraction of
# 128, from which 136 is taken away.
INT4 = gl.constexpr("""{
    .reg .b32 t<4>, mask, one, bias;
    mov.b32 mask, 0x000F000F;
    mov.b32 one, 0x43004300;
    mov.b32 bias, 0x43084308;
    lop3.b32 t0, $8, mask, one, 0xEA;
    shr.u32 t1, $8, 4;
    lop3.b32 t1, t1, mask, one, 0xEA;
    shr.u32 t2, $8, 8;
    lop3.b32 t2, t2, mask, one, 0xEA;
    shr.u32 t3, $8, 12;
    lop3.b32 t3, t3, mask, one, 0xEA;
    sub.rn.bf16x2 t0, t0, bias;
    sub.rn.bf16x2 t1, t1, bias;
    sub.rn.bf16x2 t2, t2, bias;
    sub.rn.bf16x2 t3, t3, bias;""")
# fp4: as `fragments._spread` has the bits, shifted to where bfloat16 has its sign, exponent and
# fraction; times $9, which is the scale and 2^126 for the other bias.
FP4 = gl.constexpr("""{
    .reg .b32 t<4>, u, mask;
    mov.b32 mask, 0x81C081C0;
    shl.b32 t0, $8, 6;
    and.b32 t0, t0, mask;
    shf.r.wrap.b32 t1, $8, $8, 4;
    and.b32 t1, t1, mask;
    shl.b32 t2, $8, 2;
    and.b32 t2, t2, mask;
    and.b32 t3, $8, 0x81808180;
    shr.u32 u, $8, 8;
    lop3.b32 t3, u, 0x00400040, t3, 0xEA;
    mul.rn.bf16x2 t0, t0, $9;
    mul.rn.bf16x2 t1, t1, $9;
    mul.rn.bf16x2 t2, t2, $9;
    mul.rn.bf16x2 t3, t3, $9;""")
# int4 times the scale in $9.
SCALED = gl.constexpr("""
    .reg .b32 scale;
    mov.b32 scale, {$9, $9};
    mul.rn.bf16x2 t0, t0, scale;
    mul.rn.bf16x2 t1, t1, scale;
    mul.rn.bf16x2 t2, t2, scale;
    mul.rn.bf16x2 t3, t3, scale;""")
OUTPUTS = gl.constexpr("""
    mov.b32 {$0, $1}, t0;
    mov.b32 {$2, $3}, t1;
    mov.b32 {$4, $5}, t2;
    mov.b32 {$6, $7}, t3;
}""")


@gluon.constexpr_function
def scale_layout(each):
    """Of [64, each] scales: a thread has those of its two rows."""
    columns = [[0, 1 << bit] for bit in range(each.bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*columns, [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, each])


@gluon.constexpr_function
def program(form, scaled):
    if form == "fp4":
        return FP4.value + OUTPUTS.value
    return INT4.value + (SCALED.value if scaled else "") + OUTPUTS.value


@gluon.jit
def blocks_of(words):
    """A chunk's words [128, 4] -> of its two blocks of columns, [64, 4] of eight columns each."""
    each = gl.permute(gl.reshape(words, (4, 8, 4, 2, 2)), (0, 4, 1, 2, 3))
    return gl.split(gl.reshape(each, (64, 4, 2)))


@gluon.jit
def decoded(word, scale, FORM: gl.constexpr):
    """Words [64, 4] -> [64, 32] bfloat16, as the tensor cores' threads have it; times `scale` [64],
    which may be None for int4, and is `powers` for fp4."""
    TYPES: gl.constexpr = (gl.bfloat16,) * 8
    KIND: gl.constexpr = "r" if FORM == "fp4" else "h"
    if scale is None:
        o = gl.inline_asm_elementwise(
            program(FORM, False), "=h,=h,=h,=h,=h,=h,=h,=h,r", [word], TYPES, is_pure=True, pack=1
        )
    else:
        rows = gl.convert_layout(scale, gl.SliceLayout(1, word.type.layout), assert_trivial=True)
        o = gl.inline_asm_elementwise(
            program(FORM, True), "=h,=h,=h,=h,=h,=h,=h,=h,r," + KIND, [word, rows[:, None]], TYPES,
            is_pure=True, pack=1,
        )  # fmt: skip
    low = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3]))
    high = gl.join(gl.join(o[4], o[5]), gl.join(o[6], o[7]))
    return gl.reshape(gl.permute(gl.join(low, high), (0, 4, 3, 1, 2)), (64, 32))


@gluon.jit
def powers(exponents):
    """fp4's scales as stored, up to 128 -> what fp4's codes are multiplied with: 2^126 times them,
    twice in bfloat16."""
    return (exponents.to(gl.int32) + 126) * 0x00800080


@gluon.jit
def halved(x, EACH: gl.constexpr):
    """[64, EACH] -> the even columns and the odd ones, [64, EACH / 2] each."""
    return gl.split(gl.reshape(x, (64, EACH // 2, 2)))


@gluon.jit
def columns_of(x, EACH: gl.constexpr):
    """[64, EACH] -> its columns."""
    if EACH == 2:
        every = gl.split(x)
    elif EACH == 4:
        even, odd = halved(x, 4)
        a, c = gl.split(even)
        b, d = gl.split(odd)
        every = (a, b, c, d)
    else:
        even, odd = halved(x, 8)
        ae, cg = halved(even, 4)
        bf, dh = halved(odd, 4)
        a, e = gl.split(ae)
        b, f = gl.split(bf)
        c, g = gl.split(cg)
        d, h = gl.split(dh)
        every = (a, b, c, d, e, f, g, h)
    return every


@gluon.jit
def tail_scales(at, GROUP: gl.constexpr, TAIL: gl.constexpr):
    """Of the TAIL chunks after the last step, whose scales begin at `at`: [64, 256 / GROUP]."""
    EACH: gl.constexpr = 256 // GROUP
    GROUPS: gl.constexpr = (TAIL * 64 + GROUP - 1) // GROUP
    LAYOUT: gl.constexpr = scale_layout(EACH)
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    group = gl.arange(0, EACH, gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.load(at + row * GROUPS + group, mask=group < GROUPS, other=0)
