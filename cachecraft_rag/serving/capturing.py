"""Capturing segments of a prompt without answering it, for priming."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cachecraft_rag.compute.captures.write_back import CaptureContext, CaptureDescriber
from cachecraft_rag.compute.driver import Work, prefill_steps
from cachecraft_rag.compute.job import PrefillJob
from cachecraft_rag.compute.rows import Rows
from cachecraft_rag.model.decoder import Decoder
from cachecraft_rag.serving.loop.step_loop import StepLoop
from cachecraft_rag.serving.loop.task import LoopTask
from cachecraft_rag.types.captures import RemovedChunks
from cachecraft_rag.types.prompts import Prompt


@dataclass(frozen=True, eq=False)
class LocalCapturer:
    """Captures segments with the model of this process."""

    decoder: Decoder
    loop: StepLoop
    write_back: CaptureDescriber

    def capture(
        self, prompt: Prompt, captures: Sequence[int], *, primed: bool, namespace: str
    ) -> None:
        """Compute a prompt, capture the segments with these indices, and wait until they are stored or dropped.

        There is at least one index, and they ascend; segments after the last are not computed. What is stored already
        is captured again. A private capture, or one that the store does not take, is logged and counted in its `stats`.
        `primed` is noted in the variants; `namespace` "" is the describer's. Not for the loop's own thread.
        """
        # tokens after the last capture need not be computed
        bounds = prompt.bounds[: captures[-1] + 2]
        rows = Rows.of(bounds, new=range(bounds[-1]))
        job = PrefillJob(prompt.token_array[: bounds[-1]], rows, captures=captures)
        context = CaptureContext(
            prompt.segments,
            prompt.bounds,
            exact_shares=[1.0] * len(prompt.segments),
            session=None,
            primed=primed,
            removed=self.write_back.follow(RemovedChunks(), namespace),
            namespace=namespace,
        )

        # an interruption of the caller falls before `submit` or after it
        def steps(_: LoopTask) -> Work[None]:
            result = yield from prefill_steps(self.decoder, job)
            self.write_back.submit(result.recorder, result.buffer.kv[:, 0], context)

        self.loop.run(steps)
        self.write_back.wait_for([prompt.segments[index].segment_id for index in captures])
