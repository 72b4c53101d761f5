"""The real engine over a real model, with every row of logits that it samples from kept."""

from __future__ import annotations

import select
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from headrace_worker.attention.base import AttentionBackend, PackedBatch
from headrace_worker.engine import loader
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.graphs import GraphedDecoder, GraphLimits, graph_sizes
from headrace_worker.engine.messages import AddSequence, EngineReady, StepOutcome
from headrace_worker.engine.one_ahead import OneAheadEngine
from headrace_worker.engine.runner import ModelRunner
from headrace_worker.engine.schedule import ScheduledSequence
from headrace_worker.engine.settings import EngineSettings
from headrace_worker.model import load_model
from support.fake_capture import FakeCapture
from support.tiny_models import CHAT_END_ID

COMPILE_TIMEOUT_S = 30.0  # for a grammar that takes milliseconds


class Recorder:
    """Stands before a decoder, changes nothing, and keeps the last logits it gave."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._is_packed = False
        self.last_logits: torch.Tensor | None = None  # [num_rows, vocab] float32

    def pack(self) -> int:
        """Pack the decoder's weights, once only, however many engines share it."""
        if not self._is_packed:
            self._is_packed = True
            self._decoder.pack()
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, batch: PackedBatch, backend: AttentionBackend) -> torch.Tensor:
        """Return the decoder's hidden states."""
        self.last_logits = None
        hidden: torch.Tensor = self._decoder.forward(batch, backend)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the decoder's logits."""
        logits: torch.Tensor = self._decoder.logits(hidden)
        self.last_logits = logits.float().clone()
        return logits


class RowsAhead:
    """Rows of logits whose tokens are told later, or never."""

    def __init__(self, recorder: Recorder) -> None:
        self.num_told: dict[int, int] = {}  # tokens of each sequence that are known, by seq_id
        self._recorder = recorder
        self._rows: dict[tuple[int, int], torch.Tensor] = {}  # by seq_id and place of the token

    def listen_to(self, runner: Any) -> None:
        """Stand before a runner's ``launch``."""
        launch = runner.launch

        def launch_and_keep_rows(scheduled: Sequence[ScheduledSequence]) -> Any:
            keys = [(s.seq.seq_id, s.seq.num_tokens) for s in scheduled if s.samples]
            launched = launch(scheduled)
            if keys:
                assert self._recorder.last_logits is not None
                self._rows.update(zip(keys, self._recorder.last_logits, strict=True))
            return launched

        runner.launch = launch_and_keep_rows

    def take(self, seq_id: int) -> torch.Tensor:
        """Return the row of a sequence's next token, the one computed last if there are several."""
        place = self.num_told[seq_id]
        self.num_told[seq_id] += 1
        return self._rows.pop((seq_id, place))


@dataclass(frozen=True, slots=True)
class RecordedEngine:
    """What load_engine returned, and the recorder within."""

    engine: Engine
    ready: EngineReady
    recorder: Recorder
    rows_ahead: RowsAhead | None = None  # of an engine that tells a token a step after its row

    def add(self, command: AddSequence) -> None:
        """Take a sequence in; its grammar is waited for, so that a play is the same each time."""
        self.engine.add(command)
        if self.rows_ahead is not None:
            self.rows_ahead.num_told[command.seq_id] = len(command.token_ids)
        grammars = self.engine.grammars
        assert grammars is not None
        while grammars.is_waited_for:
            readable, _, _ = select.select([grammars], [], [], COMPILE_TIMEOUT_S)
            assert readable, "a grammar was never compiled"
            self.engine.take_grammars()

    def step(self) -> tuple[StepOutcome, list[torch.Tensor]]:
        """Run one step, check the books; return its outcome and a row of logits for each token."""
        outcome = self.engine.step()
        self.engine.scheduler.pool.check_integrity()
        if not outcome.tokens:
            return outcome, []
        if self.rows_ahead is not None:
            return outcome, [self.rows_ahead.take(token.seq_id) for token in outcome.tokens]
        rows = self.recorder.last_logits
        assert rows is not None
        assert len(rows) == len(outcome.tokens), "a row for each token, and no others"
        return outcome, list(rows)


class RecordedModel:
    """A model that is read once, for engines that each have a KV cache and settings of their own.

    Only one of them may be in use at a time: they share the recorder.
    """

    def __init__(self, path: Path, *, dtype: str = "float32") -> None:
        self._settings = {
            "model": str(path),
            "dtype": dtype,
            "device": "cpu",
            "num_threads": 1,
            "tokenizer_file": str(path / "tokenizer.json"),
            "eos_token_ids": (CHAT_END_ID,),
        }
        model: Any = load_model(path, dtype=getattr(torch, dtype), device=torch.device("cpu"))
        self._recorder = Recorder(model.decoder)
        self._model = replace(model, decoder=self._recorder)

    def load_engine(self, options: Mapping[str, Any]) -> RecordedEngine:
        """Call the real load_engine, in which nothing but reading the files is left out.

        With ``has_graphs``, which is no setting, decodes are replayed from graphs.
        """
        has_graphs = options.get("has_graphs", False)
        options = {name: value for name, value in options.items() if name != "has_graphs"}
        settings = EngineSettings(**{**self._settings, **options})
        with patch.object(loader, "load_model", lambda *args, **kwargs: self._model):
            engine, ready = loader.load_engine(settings)
        if has_graphs:
            _replay_decodes(engine, ready)
        if not isinstance(engine, OneAheadEngine):
            return RecordedEngine(engine, ready, self._recorder)
        rows_ahead = RowsAhead(self._recorder)
        rows_ahead.listen_to(engine.runner)
        return RecordedEngine(engine, ready, self._recorder, rows_ahead)


def _replay_decodes(engine: Engine, ready: EngineReady) -> None:
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    limits = GraphLimits(
        graph_sizes(ready.max_num_seqs), ready.block_size, engine.scheduler.admission.max_model_len
    )
    graphed = GraphedDecoder(runner.decoder, runner.backend, limits, torch.device("cpu"))
    graphed.capture(FakeCapture())
    runner.decoder = graphed
