"""What people see of a request: log lines and metrics, above all the one line about its end."""

from __future__ import annotations

import traceback

from headrace.errors import ErrorCode
from headrace.types import RequestState
from headrace_worker import logs
from headrace_worker.engine.messages import StepOutcome
from headrace_worker.serving.metrics import Metrics
from headrace_worker.serving.request import InFlight

_OUR_FAULTS = (ErrorCode.ENGINE_FAILURE, ErrorCode.LOST)


class Reporter:
    """Prompt and output text never pass through here."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._log = logs.get_logger()

    def paused(self, num_unsent_tokens: int) -> None:
        """Redis takes tokens slower than the engine makes them."""
        self._log.warning(logs.READER_SLOW, num_unsent_tokens=num_unsent_tokens)

    def draining(self, num_held: int) -> None:
        """Nothing is claimed any more."""
        self._log.info(logs.WORKER_DRAINING, num_held=num_held)

    def received(self, request: InFlight) -> None:
        """A grant came in."""
        grant = request.grant
        self._log.debug(logs.REQUEST_RECEIVED, request_id=grant.request_id, epoch=grant.epoch)
        if grant.epoch > 1:
            self._metrics.count_reclaimed()
            self._log.warning(
                logs.DELIVERY_RECLAIMED,
                request_id=grant.request_id,
                epoch=grant.epoch,
                strikes=grant.strikes,
                num_tokens=grant.num_tokens,
            )

    def tripped(self, request: InFlight, error: Exception) -> None:
        """A fault of ours while it was prepared; what the error says may quote the prompt."""
        self._log.error(
            logs.REQUEST_FAILED,
            request_id=request.grant.request_id,
            fault=type(error).__name__,
            where="".join(traceback.format_tb(error.__traceback__)),
        )

    def stepped(self, outcome: StepOutcome) -> None:
        """The engine did one step."""
        self._metrics.observe_step(outcome)
        self._log.debug(
            logs.ENGINE_STEPPED,
            step=outcome.step,
            num_seqs=outcome.num_scheduled_seqs,
            num_tokens=outcome.num_scheduled_tokens,
            num_prefill_tokens=outcome.num_prefill_tokens,
            free_blocks=outcome.free_blocks,
            step_s=outcome.step_s,
        )

    def admitted(self, request: InFlight) -> None:
        """The engine began with it."""
        self._log.debug(
            logs.REQUEST_ADMITTED,
            request_id=request.grant.request_id,
            cached_tokens=request.num_cached_tokens,
        )

    def first_token(self, request: InFlight) -> None:
        """Its first token came, the first of this epoch at least."""
        ttft_s = request.ttft_s
        if ttft_s is not None:
            self._metrics.observe_first_token(ttft_s)
        self._log.debug(
            logs.REQUEST_FIRST_TOKEN, request_id=request.grant.request_id, ttft_s=ttft_s
        )

    def preempted(self, request: InFlight) -> None:
        """Its blocks were taken; said once a request."""
        if request.num_preemptions == 1:
            self._log.warning(logs.SEQUENCE_PREEMPTED, request_id=request.grant.request_id)

    def rolled_back(self, request: InFlight, num_tokens: int) -> None:
        """Redis lost tokens that it had acknowledged; they are sent again."""
        self._log.warning(
            logs.STREAM_ROLLED_BACK, request_id=request.grant.request_id, num_tokens=num_tokens
        )

    def dropped(self, request: InFlight, why: str) -> None:
        """It is no longer ours."""
        self._log.warning(
            logs.REQUEST_DROPPED,
            request_id=request.grant.request_id,
            epoch=request.grant.epoch,
            why=why,
        )

    def dead_lettered(self, request: InFlight) -> None:
        """It took down the engine that ran it alone, once too often."""
        self._log.error(logs.REQUEST_DEAD_LETTERED, request_id=request.grant.request_id)

    def finished(self, request: InFlight) -> None:
        """It ended; this one line must be enough to say why it was slow."""
        end, usage, timings = request.end, request.usage, request.timings()
        assert end is not None
        code = None if end.code is None else end.code.value
        self._metrics.observe_finished(end.reason, usage, timings, code=code)
        request_id = request.grant.request_id
        if end.code in _OUR_FAULTS:
            self._log.error(
                logs.REQUEST_FAILED, request_id=request_id, code=code, error=end.message
            )
        elif end.state is RequestState.FAILED:
            # Its message may quote the prompt, and goes to whoever asked.
            self._log.warning(logs.REQUEST_REJECTED, request_id=request_id, code=code)
        elif end.state is RequestState.CANCELLED:
            self._log.warning(logs.REQUEST_CANCELLED, request_id=request_id)
        self._log.info(
            logs.REQUEST_FINISHED,
            request_id=request_id,
            finish_reason=end.reason.value,
            input_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            queue_s=_rounded(timings.queue_s),
            ttft_s=_rounded(timings.ttft_s),
            tpot_s=_rounded(timings.tpot_s),
            e2e_s=_rounded(timings.e2e_s),
            epoch=request.grant.epoch,
            strikes=request.grant.strikes,
            preemptions=request.num_preemptions,
        )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
