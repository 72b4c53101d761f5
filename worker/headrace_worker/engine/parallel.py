"""An engine whose model is cut over several ranks: a process for each, the first one in charge.

::

    transport ── commands, outcomes ── first rank ── orders ──▶ other ranks
                                          └────── collectives ──────┘

The first rank schedules, samples and answers. The others know of no sequence: they compute what is
ordered, on the same numbers of KV blocks. Ranks that part ways, because one died or failed, all
end, and the worker starts them again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import distributed

from headrace_worker.engine.engine import Engine
from headrace_worker.engine.errors import EngineRefused, SettingsError
from headrace_worker.engine.leading import FollowingDecoder, LeadingDecoder
from headrace_worker.engine.loader import choose_device, load_engine
from headrace_worker.engine.messages import EngineReady
from headrace_worker.engine.orders import JoinRanks
from headrace_worker.engine.rank_group import RankGroup
from headrace_worker.engine.rendezvous import listen, meet
from headrace_worker.engine.runner import ModelRunner
from headrace_worker.engine.settings import EngineSettings
from headrace_worker.model.decoder import Decoder
from headrace_worker.model.errors import ModelLoadError
from headrace_worker.model.loading import check_ranks


def load_leading(
    settings: EngineSettings, on_loss: Callable[[str], None], cleanup: ExitStack
) -> tuple[Engine, EngineReady]:
    """Start the other ranks and build the engine with them; ``cleanup`` ends them.

    Raises SettingsError or ModelLoadError, as for one rank, or if it cannot be cut.
    """
    size = settings.tensor_parallel_size
    group = RankGroup(on_loss)
    cleanup.callback(group.stop)
    group.start(size)
    device = rank_device(settings.device, 0, size)
    check_ranks(settings.model, settings.model_impl, size)
    with listen() as listener:
        port = listener.getsockname()[1]
        group.order_each(lambda rank: JoinRanks(rank, size, port, settings))
        ranks = meet(0, size, port, device, listener)
    _share_threads(settings, device)
    lead = partial(LeadingDecoder, ranks=ranks, order=group.order, explain=group.explain)
    return load_engine(settings, ranks, lead)


def load_following(join: JoinRanks) -> FollowingDecoder:
    """Meet the others and load this rank's part; raises EngineRefused as the first one would."""
    settings = join.settings
    try:
        device = rank_device(settings.device, join.rank, join.size)
        ranks = meet(join.rank, join.size, join.port, device)
        _share_threads(settings, device)
        engine, _ = load_engine(settings, ranks)
    except (ModelLoadError, SettingsError) as error:
        raise EngineRefused(f"{type(error).__name__}: {error}") from error
    runner = engine.runner
    assert isinstance(runner, ModelRunner), runner
    assert isinstance(runner.decoder, Decoder), runner.decoder
    return FollowingDecoder(runner.decoder, runner.backend, ranks)


def rank_device(name: str, rank: int, size: int) -> torch.device:
    """Return a rank's device: the GPU of its number, or the CPU that all share.

    Raises SettingsError where there are fewer GPUs than ranks, one of them was named, or torch
    cannot add up over them.
    """
    device = choose_device(name)
    if device.type != "cuda":
        return device
    if device.index is not None:
        raise SettingsError(
            f"device {name!r} is one GPU, and tensor_parallel_size {size} takes cuda:0"
            f" to cuda:{size - 1}; CUDA_VISIBLE_DEVICES says which these are"
        )
    if size > torch.cuda.device_count():
        raise SettingsError(
            f"tensor_parallel_size {size} is more than the {torch.cuda.device_count()} CUDA devices"
            " that torch sees"
        )
    if not distributed.is_nccl_available():
        raise SettingsError(
            f"tensor_parallel_size {size} needs NCCL, which torch {torch.__version__} was built"
            " without"
        )
    return torch.device("cuda", rank)


def _share_threads(settings: EngineSettings, device: torch.device) -> None:
    """Give each rank its part of the CPU, unless a number of threads, for each, was set."""
    if settings.num_threads is None and device.type == "cpu":
        num_threads = torch.get_num_threads() // settings.tensor_parallel_size
        torch.set_num_threads(max(1, num_threads))
