"""A run on one process: its parts are made, its stages run, its result is told."""

from __future__ import annotations

import time
from typing import Any

from torsh_trainer.callbacks.base import asks_to_stop
from torsh_trainer.rundir import RunDir
from torsh_trainer.strategies.compiling import explain_failures
from torsh_trainer.training import attention, numerics, out_of_memory
from torsh_trainer.training.restore import restore
from torsh_trainer.training.run_parts import RunParts
from torsh_trainer.training.run_result import describe_run, make_result
from torsh_trainer.training.run_stages import find_stages


class RankRun:
    """One rank of a run, over its parts, from its data to its result; ``run`` once.

    ``began`` is when the process began with it, by ``time.perf_counter``.
    """

    def __init__(self, parts: RunParts, *, began: float) -> None:
        self.parts = parts
        self._began = began
        self._stages = find_stages(parts)

    def run(self) -> None:
        """Runs the stages, in their order, and tells the callbacks of it.

        Raises:
            TorshError: what went wrong, out of memory too.
        """
        in_words = out_of_memory.explain_out_of_memory(self.parts.comm, vars(self.parts))
        kernels = attention.explain_refusals(self.parts.spec.attention)
        with in_words, kernels, explain_failures():
            self._run()

    def _run(self) -> None:
        parts = self.parts
        self._begin()
        for stage in parts.spec.stages:
            self._stages[stage](parts)
        parts.checkpointer.close()
        result = self.result()
        for callback in parts.callbacks:
            callback.on_end(result)

    def _begin(self) -> None:
        """Everything before the first stage: data, what the run goes on from, who hears of it."""
        parts = self.parts
        parts.membership.begin()
        parts.check_data()
        if parts.trains and parts.spec.checkpoint.saves:
            parts.checkpointer.claim()
        restore(parts)
        numerics.search_kernels(
            parts.spec.cudnn_benchmark,
            parts.comm.device,
            deterministic=parts.spec.deterministic,
            fixed_shapes=parts.factory.has_fixed_shapes,
        )
        if parts.world.is_rank_zero:
            facts = numerics.facts(parts.precision, parts.comm.device)
            RunDir(parts.run_dir).add_provenance({"numerics": facts})
        if parts.trains and parts.job.compile is None:
            attention.watch_first_forward(parts.engine.model, self._note_attention)
        with parts.engine.whole_shapes():
            info = describe_run(parts)
        answers = [asks_to_stop(c, "on_start", c.on_start(info)) for c in parts.callbacks]
        parts.program.wants_stop = any(answers)

    def _note_attention(self, seen: attention.KernelWatch) -> None:
        parts = self.parts
        if parts.world.is_rank_zero and seen.kernels:
            if parts.comm.device.type != "cpu":
                seen.tell()
            facts = {
                "asked": attention.as_typed(parts.spec.attention),
                "kernels": dict(seen.kernels),
            }
            RunDir(parts.run_dir).add_provenance({"attention": facts})

    def result(self) -> dict[str, Any]:
        """The content of result.json."""
        return make_result(self.parts, wall_s=time.perf_counter() - self._began)

    def tell_failure(self, error: BaseException) -> None:
        """Tells the callbacks that the run has failed."""
        for callback in self.parts.callbacks:
            callback.on_error(error)

    def close(self) -> None:
        """Gives back what the parts hold, as far as they were made."""
        self.parts.close()
