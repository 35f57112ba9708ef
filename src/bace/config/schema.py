"""The settings of a run that are not a method's own. Field names are flags (`--train.lr`) and YAML keys."""

from dataclasses import dataclass, field
from typing import Literal

OptimiserName = Literal["sgd", "adam", "adamw"]
StudyName = Literal["probing", "tracking", "gallery", "bias"]
LoggerName = Literal["tensorboard", "wandb", "mlflow"]


@dataclass
class Training:
    """How the network is trained.

    Args:
        epochs: passes over a task's training examples.
        batch_size: examples per step. Methods that replay give `replay_ratio` of it to the memory once there is one.
        accumulate: read each batch in so many parts and add up their gradients: the result is that of the whole batch,
            with the activations of one part in memory, for one more forward pass.
        recompute: keep only what enters each block and compute the rest again in the backward pass: less memory for
            activations, for one more forward pass.
        bucketing: texts and entities: training batches of texts of similar lengths, so that less is padded. Prediction
            always does so.
        replay_ratio: share of a batch drawn from memory; 0 replays nothing.
        replay_o: words labelled O in replayed sentences: learned as class 0 (`label`), or (`distil`) only by what the
            method's teacher, if it has one, says of them.
        buffer_view: replayed examples are seen in a fresh random view at each draw, or in one view per epoch.
        optimiser: "sgd" for pictures, "adamw" for texts and entities.
        lr: learning rate of the encoder.
        head_lr: learning rate of the head; default: `lr`.
        momentum: of SGD.
        weight_decay: on weights; never on biases, norms and the head's scale.
        schedule: of the learning rate over a stage.
        warmup: share of a stage in which the learning rate first rises from 0.
        clip: largest gradient norm; default: no clipping.
        reset_optimiser: a new optimiser for every stage of every task; otherwise its state is carried over.
        early_stop: end a stage after this many epochs without a better validation loss; 0: never. Needs
            benchmark.val_fraction.
        eval_batch_size: examples per pass without gradient.
        prefetch: batches that a second thread prepares ahead of their steps; default: 2 for an accelerator, none for
            the CPU.
        device: "auto" takes a GPU if there is one.
        precision: of the passes through the encoder; weights, head and losses are float32. Gradients of float16 are
            scaled, and a step whose gradients overflow is left out. Half precisions are probed first: some CPUs report
            support but crash.
        tf32: products of float32 with ten bits after the point on GPUs that can: faster, and less exact.
        channels_last: pictures enter the encoder in this layout, which some GPUs prefer.
        compile: the encoder's blocks are compiled (torch.compile), which takes minutes before the first step.
        deterministic: only algorithms that give the same bits again, where there are such.
        threads: of the CPU; 0 leaves torch's choice. Recorded, and used again on resume.
    """

    epochs: int = 5
    batch_size: int = 128
    accumulate: int = 1
    recompute: bool = False
    bucketing: bool = False
    replay_ratio: float = 0.5
    replay_o: Literal["label", "distil"] = "distil"
    buffer_view: Literal["fresh", "epoch"] = "fresh"
    optimiser: OptimiserName = "sgd"
    lr: float = 1e-3
    head_lr: float | None = None
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup: float = 0.0
    clip: float | None = None
    reset_optimiser: bool = True
    early_stop: int = 0
    eval_batch_size: int = 128
    prefetch: int | None = None
    device: str = "auto"
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    tf32: bool = False
    channels_last: bool = False
    compile: bool = False
    deterministic: bool = True
    threads: int = 0


@dataclass
class HeadSettings:
    """The classifier, for methods that do not define their own.

    Args:
        kind: "cosine" (one learned scale for all classes) or "linear".
        sigma_init: the cosine head's first scale.
        sigma_learn: whether the scale is trained.
        head_init: new rows at random, or imprinted from the mean features of their class.
    """

    kind: Literal["cosine", "linear"] = "cosine"
    sigma_init: float = 10.0
    sigma_learn: bool = True
    head_init: Literal["random", "imprint"] = "random"


@dataclass
class Backbone:
    """The pre-trained encoder.

    Args:
        name: a name of `bace list backbones`, a hub id, a folder in the layout of transformers, timm or
            sentence-transformers, or a ViT weights file (.npz, .safetensors, .pth).
        freeze: how many of the lowest blocks are frozen (with the embedding).
        cache: megabytes in which runs keep what frozen blocks make of each example, so that it is computed once and not
            in every epoch; of no use without freeze. Random views of pictures seldom come again: benchmark.views
            bounds their number. Above 2,000 they are in a file in BACE_CACHE (pictures). 0: none, as in a Learner.
        cache_half: keep them in half precision, in half the room.
        adapter: hidden size of Houlsby adapters; then only adapters, LayerNorms and head are trained. 0: none.
        image_size: side of the pictures that the encoder is given; default: its own.
        normalise: pictures: pixels are normalised with the encoder's own mean and standard deviation; off: they stay in
            [0, 1], as LAMDA-PILOT gives them to every encoder.
        pooling: the feature of a text: its class token, or the mean or maximum over its tokens. "own": what a folder of
            sentence-transformers says (also whether features have unit length), of others the class token.
    """

    name: str = "digits-vit"
    freeze: int = 0
    cache: int = 0
    cache_half: bool = False
    adapter: int = 0
    image_size: int | None = None
    normalise: bool = True
    pooling: Literal["own", "class", "mean", "max"] = "own"


@dataclass
class MemoryBudget:
    """How many old examples may be kept.

    Args:
        size: in all, shared equally by the classes (entity types) seen so far.
        per_class: instead, a fixed number per class.
        select: how the examples of a finished task are chosen; sentences always at random.
        allow_missing_classes: accept a memory smaller than the number of classes.
    """

    size: int = 0
    per_class: int = 0
    select: Literal["herding", "random"] = "herding"
    allow_missing_classes: bool = False


@dataclass
class Checkpoints:
    """When the state of a run is saved.

    Args:
        every: optimiser steps between two checkpoints inside a task; 0: as many as fit in `minutes`.
        minutes: time between two checkpoints inside a task; 0: only at the end of each task and by `every`.
        keep: how many are kept; the oldest are deleted.
    """

    every: int = 0
    minutes: float = 10.0
    keep: int = 2


@dataclass
class Measures:
    """What is measured.

    Args:
        fgt_max: forgetting from the best of the earlier scores, or (never negative) of all scores.
        fwt: measure forward transfer before each task (costs a pass over its training and test examples).
        map_foreign_types_to_O: entities: a predicted type of another task counts as O, not as a type with F1 0 in the
            macro F1 and an error in the micro F1 (leaks the task; off).
    """

    fgt_max: Literal["earlier", "all"] = "earlier"
    fwt: bool = True
    map_foreign_types_to_O: bool = False  # noqa: N815 (the name is the field's)


@dataclass
class Config:
    """Everything that makes a run: the same run again from this alone."""

    benchmark: dict[str, object]  # {"name": ..., settings}
    method: dict[str, object]  # {"name": ..., hyper-parameters}
    backbone: Backbone = field(default_factory=Backbone)
    head: HeadSettings = field(default_factory=HeadSettings)
    memory: MemoryBudget = field(default_factory=MemoryBudget)
    train: Training = field(default_factory=Training)
    measure: Measures = field(default_factory=Measures)
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    studies: list[StudyName] = field(default_factory=list)  # what is observed beside the measures: docs/studies.md
    log: list[LoggerName] = field(default_factory=list)  # where events go beside log.jsonl: docs/loggers.md
    seed: int = 0
