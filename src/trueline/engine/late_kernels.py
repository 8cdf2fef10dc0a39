"""Kernels that are compiled while requests wait: warm-up should have asked for them."""

from __future__ import annotations

import logging
from typing import Any

LOG = logging.getLogger("trueline")


class LateKernels:
    def __init__(self) -> None:
        self.count = 0

    def watch(self) -> None:
        """From now on, in this process; on a GPU, where there is Triton."""
        from triton import knobs

        knobs.runtime.jit_post_compile_hook = self._compiled

    @staticmethod
    def stop() -> None:
        """In this process."""
        from triton import knobs

        knobs.runtime.jit_post_compile_hook = None

    def _compiled(self, *, repr: str, **_: Any) -> None:
        """Or found in the kernel cache on disk, which takes milliseconds."""
        self.count += 1
        LOG.warning("kernel compiled while serving: %s", repr)
