"""What the engine asks of whatever computes a step, and what it hears of each row."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ReadOnlyList
from typing import Protocol

from headrace_worker.engine.messages import PromptLogprobs, SampledToken, SequenceFailure
from headrace_worker.engine.schedule import ScheduledSequence

RowResult = SampledToken | PromptLogprobs | SequenceFailure


class Runner(Protocol):
    """Computes what was scheduled."""

    def execute(self, scheduled: ReadOnlyList[ScheduledSequence]) -> list[RowResult]:
        """Run one forward; return what became of its rows.

        That is a token or a failure for each share that samples, and scores, or a failure, for
        each that reaches prompt tokens with scores owed. A sequence fails once, and then is told
        nothing else.

        Raises EngineStepError naming one sequence when only that one cannot be computed: nothing
        was committed, and the others run again in the next step. Raises StepTooLarge when there is
        no memory for it. Anything else it raises means that the engine is broken.
        """
        ...


def check_answers(sampling: set[int], results: Iterable[RowResult]) -> None:
    """Assert that each sequence that was sampled has a token or a failure."""
    answered = {told.seq_id for told in results if not isinstance(told, PromptLogprobs)}
    assert sampling <= answered, f"sequences {sampling - answered} were sampled without result"
