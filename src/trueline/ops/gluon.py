# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""What our kernels in Gluon share. A program has two consumer warp groups of four warps each, and
four producer warps that load for them; barriers in shared memory say which buffers are full and
which are empty."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from trueline.ops.jit import Launcher

COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
PRODUCER_THREADS = gl.constexpr(128)
"""Each arrives at a barrier when its own asynchronous copies are done."""
NOTHING = gl.constexpr(float("-inf"))
LN_2 = gl.constexpr(0.6931471805599453)
CONSUMER_REGISTERS = gl.constexpr(216)


def kernel(**options):
    """`gluon.jit` for what is launched by itself. Registers: an equal share of a multiprocessor's
    for each of a program's twelve warps; consumers take more, from the producers."""
    return lambda fn: Launcher(gluon.jit(fn, **options), num_warps=4, maxnreg=168, launch_pdl=True)


@gluon.jit
def signal(barrier):
    """Arrives once all threads of the warp group are here."""
    gl.thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def made_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def unknown_zero():
    """Operands found with it are found anew each time. The compiler would keep the addresses of
    all through the loop otherwise, more than there are registers for."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def copy_columns(to, rows, seen, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """Columns FIRST .. FIRST + COLUMNS of rows, by where these begin; zeros where none is seen."""
    column = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, COPIED))
    async_copy.async_copy_global_to_shared(to, rows[:, None] + column[None, :], mask=seen[:, None])


@gluon.jit
def swiglu(gate, up, LIMIT: gl.constexpr):
    """silu(gate) × up; with a LIMIT, clamped as the op mlp says, and NaN stays NaN."""
    if LIMIT is not None:
        gate = gl.where(gate > LIMIT, LIMIT, gate)
        up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up))
    return gate / (1 + gl.exp(-gate)) * up


@gluon.jit
def signal_copied(barrier):
    """Arrives when the asynchronous copies issued so far are done."""
    async_copy.mbarrier_arrive(barrier, increment_count=False)
