"""Make a method with its network and memory, on a stream, from a configuration."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import nn

from bace import ranks
from bace.config.schema import Config
from bace.core.memory import Memory
from bace.core.method import Method
from bace.core.position import Position
from bace.core.stream import Stream
from bace.data.benchmarks import TaskTables, find_benchmark
from bace.data.modalities import MODALITIES
from bace.data.modalities.text import KeptTokenizer, tokenizer_of
from bace.data.modalities.token import Token, for_words
from bace.data.modality import Examples
from bace.data.settings import data_settings
from bace.errors import ConfigError
from bace.experiments.stream import make_stream
from bace.methods import find_method
from bace.models.adapters import add_adapters
from bace.models.backbones import OWN
from bace.models.encoder import Encoder, PassCounter, freeze_prefix, keep_prefix
from bace.models.frozen_prefix import PrefixCaches
from bace.models.heads import CosineHead, Head, LinearHead
from bace.models.image_encoder import ImageEncoder
from bace.models.loading import load_encoder
from bace.models.model import Model
from bace.models.text_encoder import TextEncoder
from bace.randomness import generator


def assemble(
    config: Config, caches: PrefixCaches | None = None, visible: Callable[[list[TaskTables]], list[TaskTables]] = list
) -> tuple[Method, Stream]:
    """The method and the stream of a configuration, attached to each other. `visible` chooses which data of the
    benchmark may be part of the stream; by default all of it."""
    benchmark = find_benchmark(str(config.benchmark["name"]))
    prepare_torch(config)
    method = make_method(config, benchmark.modality)
    settings = data_settings(config)
    parts = visible(benchmark.parts(settings))  # before a backbone is fetched: the path may be wrong
    encoder = load_backbone(config)
    stream = make_stream(parts, settings, encoder, config.backbone.name, config.seed)
    attach(method, stream, config, encoder, caches)
    return method, stream


def method_on(stream: Stream, config: Config, encoder: Encoder | None = None) -> Method:
    """The method of a configuration on an existing stream. `encoder` is the backbone, if it is loaded already."""
    prepare_torch(config)
    method = make_method(config, stream.modality.name)
    attach(method, stream, config, encoder or load_backbone(config))
    return method


def make_method(config: Config, modality: str) -> Method:
    found = find_method(str(config.method["name"]))
    if modality not in found.modalities:
        why = f" ({found.card.o_rows})" if found.card and MODALITIES[modality].background is not None else ""
        raise ConfigError(
            f"{found.title} is not defined for {modality} data{why}: it works on {', '.join(sorted(found.modalities))}"
        )
    return found(**{k: v for k, v in config.method.items() if k != "name"})


def load_backbone(config: Config) -> Encoder:
    own = OWN.get(config.backbone.name)
    encoder: Encoder = own() if own else load_encoder(config.backbone.name, image_size=config.backbone.image_size)
    if isinstance(encoder, ImageEncoder) and not config.backbone.normalise:
        encoder.mean, encoder.std = (0.0,) * encoder.channels, (1.0,) * encoder.channels
    pooling = config.backbone.pooling
    if isinstance(encoder, TextEncoder) and pooling != "own":
        encoder.pooling, encoder.normalised = pooling, False
    elif pooling not in ("own", "class"):
        raise ConfigError(
            f"backbone.pooling is {pooling}, but only texts are pooled: the feature of '{config.backbone.name}' is "
            "its class token. Leave it out."
        )
    modality = MODALITIES[find_benchmark(str(config.benchmark["name"])).modality]
    if isinstance(encoder, TextEncoder) and isinstance(modality, Token):
        encoder.tokenizer = KeptTokenizer(for_words(tokenizer_of(encoder)))
    return encoder


def attach(
    method: Method, stream: Stream, config: Config, encoder: Encoder, caches: PrefixCaches | None = None
) -> None:
    """Give a method its stream, memory and network."""
    device = torch.device(device_name(config.train.device))
    passes, caches = PassCounter(), caches or PrefixCaches()  # the run's networks share both

    def model_of(encoder: Encoder) -> Model:
        encoder.passes = passes
        return make_model(encoder, config, caches, method.stream.data).to(device)

    stream.device = device
    method.stream, method.training_settings, method.now = stream, config.train, Position(config.seed)
    method.memory = Memory(**dataclasses.asdict(config.memory))
    check_memory(method)
    method.fresh_model = lambda: model_of(load_backbone(config))
    method.model = method.build(model_of(encoder))
    check_pieces(method, config.train.accumulate)
    check_batch_norms(method)
    method.to(device)
    for memory in method.memories():
        memory.cpu()  # ids, not numbers to compute with


def check_memory(method: Method) -> None:
    """Refuse a memory that cannot hold one example of each class before training, not after the last task."""
    if method.uses_memory and len(method.stream):
        method.quota(method.stream[-1])


def check_pieces(method: Method, pieces: int) -> None:
    """Refuse to read batches in parts if a method or its network needs whole batches."""
    networks = (module for module in method.modules() if isinstance(module, Model))
    if pieces > 1 and (method.whole_batches or not all(network.in_pieces for network in networks)):
        raise ConfigError(
            f"{method.title} cannot read a batch in parts (train.accumulate is {pieces}): use train.recompute, or a "
            "smaller train.batch_size"
        )


def check_batch_norms(method: Method) -> None:
    """Refuse layers that take means over a batch, because each of several processes passes only a share of it."""
    norms = [name for name, module in method.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if norms and ranks.size() > 1:
        raise ConfigError(
            f"{method.title} with this backbone cannot be trained by several processes (train.devices): '{norms[0]}' "
            "takes means over a batch, but each process would only see its own share. Use one device"
        )


def make_model(encoder: Encoder, config: Config, caches: PrefixCaches, data: Examples) -> Model:
    if config.backbone.adapter:
        add_adapters(encoder, config.backbone.adapter, generator(config.seed, "adapters"))
    if config.backbone.freeze:
        freeze_prefix(encoder, config.backbone.freeze)
    precision: torch.dtype = getattr(torch, config.train.precision)
    if isinstance(encoder, ImageEncoder):
        encoder.channels_last = config.train.channels_last
    if config.train.compile:
        for block in encoder.blocks:
            block.compile()
    keep_prefix(encoder, config.backbone, precision, caches, data)
    encoder.pieces, encoder.recompute = config.train.accumulate, config.train.recompute
    head: Head
    if config.head.kind == "cosine":
        head = CosineHead(encoder.width, config.head.sigma_init, config.head.sigma_learn)
    else:
        head = LinearHead(encoder.width)
    return Model(encoder, head, precision)


def device_name(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].partition(":")[0]
        reason = "no such device" if reason.startswith("Expected one of") else reason
        raise ConfigError(f"train.device '{wanted}' cannot be used here ({reason}): use auto, cpu or cuda") from error
    return wanted


def prepare_torch(config: Config) -> None:
    """Set threads and determinism, and check that the requested precision does not crash the process."""
    train = config.train
    if train.threads:
        torch.set_num_threads(train.threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # use_deterministic_algorithms does the same, but imports the compiler, which takes seconds
    torch.set_deterministic_debug_mode("warn" if train.deterministic else "default")
    torch.backends.cudnn.benchmark = not train.deterministic
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = train.tf32
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time, changes nothing here
    if train.precision != "float32" and device_name(train.device).startswith("cpu"):
        probe = f"import torch; a = torch.ones(64, 64, dtype=torch.{train.precision}); print(float((a @ a)[0, 0]))"
        if subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode:
            raise ConfigError(f"train.precision {train.precision} does not work on this CPU (probed): use float32")
