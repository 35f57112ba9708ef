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
        accumulate: read each batch in this many parts and add up their gradients, which gives the gradient of the whole
            batch. Memory holds the activations of one part only, at the price of one more forward pass.
        recompute: keep only the inputs of each block and compute the rest again in the backward pass. This saves memory
            for activations, at the price of one more forward pass.
        bucketing: put texts of similar lengths into a training batch, so that less is padded (texts and entities).
            Prediction always does this.
        replay_ratio: the share of a batch that is drawn from memory; 0 replays nothing.
        replay_o: how words labelled O in replayed sentences are learned by methods that leave those of new sentences to
            their teacher: as class 0 (`label`), or also from the teacher (`distil`). Others learn them as class 0.
        buffer_view: show a replayed example in a new random view at each draw (`fresh`), or in one view per epoch.
        optimiser: the default is "sgd" for pictures and "adamw" for texts and entities.
        lr: the learning rate of the encoder.
        head_lr: the learning rate of the head; the default is `lr`.
        momentum: the momentum of SGD.
        weight_decay: applies to weights, but never to biases, norms and the head's scale.
        schedule: how the learning rate changes during a stage.
        warmup: the share of a stage during which the learning rate rises from 0.
        clip: the largest gradient norm; the default is no clipping.
        reset_optimiser: make a new optimiser for every stage of every task; otherwise its state is carried over.
        early_stop: end a stage after this many epochs without a better validation loss; 0 means never. This needs
            benchmark.val_fraction.
        eval_batch_size: examples per pass without gradient.
        prefetch: the number of batches that a second thread prepares in advance; the default is 2 for an accelerator
            and none for the CPU.
        device: "auto" takes a GPU if there is one.
        devices: the number of processes that train one run together. Each takes its share of every batch and, if there
            are any, a GPU of its own. torchrun sets its own number of processes (docs/scale.md).
        precision: the precision of the passes through the encoder; weights, head and losses are float32. With float16,
            gradients are scaled, and a step whose gradients overflow is left out. Half precisions are tried first:
            some CPUs report support but crash.
        tf32: multiply float32 numbers with a mantissa of ten bits on GPUs that can; this is faster and less exact.
        channels_last: give pictures to the encoder in this layout, which some GPUs prefer.
        compile: compile the encoder's blocks (torch.compile), which takes minutes before the first step.
        deterministic: use only algorithms that always give the same bits, where they exist.
        threads: the number of CPU threads; 0 leaves the choice to torch. It is recorded and used again on resume.
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
    devices: int = 1
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
        sigma_init: the initial scale of the cosine head.
        sigma_learn: train the scale.
        head_init: draw new rows at random, or imprint them from the mean features of their class.
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
        freeze: the number of lowest blocks that are frozen, with the embedding.
        cache: megabytes for the output of frozen blocks, so that it is computed once and not in every epoch. It has no
            effect without freeze. Random views of pictures seldom repeat; benchmark.views limits their number. A cache
            of pictures above 2,000 MB is a file in BACE_CACHE. 0 means no cache, and a Learner never has one.
        cache_half: keep this output in half precision, which takes half the space.
        adapter: the hidden size of Houlsby adapters; then only adapters, LayerNorms and head are trained. 0 means none.
        image_size: the side of the pictures that the encoder is given; the default is the encoder's own.
        normalise: normalise pixels with the encoder's own mean and standard deviation. Otherwise they stay in [0, 1],
            as LAMDA-PILOT gives them to every encoder.
        pooling: the feature of a text: its class token, or the mean or maximum over its tokens. "own" follows a folder
            of sentence-transformers (also whether features have unit length); for others it is the class token.
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
        size: the number of examples in all, shared equally by the classes (entity types) seen so far.
        per_class: a fixed number per class, instead of `size`.
        select: how the examples of a finished task are chosen; sentences are always chosen at random.
        allow_missing_classes: accept a memory that is smaller than the number of classes.
    """

    size: int = 0
    per_class: int = 0
    select: Literal["herding", "random"] = "herding"
    allow_missing_classes: bool = False


@dataclass
class Checkpoints:
    """When the state of a run is saved.

    Args:
        every: optimiser steps between two checkpoints inside a task; 0 means as many as fit in `minutes`.
        minutes: time between two checkpoints inside a task; 0 means only at the end of each task and by `every`.
        keep: the number of checkpoints to keep; older ones are deleted.
    """

    every: int = 0
    minutes: float = 10.0
    keep: int = 2


@dataclass
class Measures:
    """What is measured.

    Args:
        fgt_max: measure forgetting from the best earlier score, or from the best of all scores (then it is never
            negative).
        fwt: measure forward transfer before each task, which costs a pass over its training and test examples.
        map_foreign_types_to_O: count a predicted entity type of another task as O, which tells the scorer the task of a
            sentence. Otherwise it is a type with F1 0 in the macro F1 and an error in the micro F1.
    """

    fgt_max: Literal["earlier", "all"] = "earlier"
    fwt: bool = True
    map_foreign_types_to_O: bool = False  # noqa: N815 (the name is the field's)


@dataclass
class Config:
    """Everything that defines a run. The same configuration gives the same run."""

    benchmark: dict[str, object]  # {"name": ..., settings}
    method: dict[str, object]  # {"name": ..., hyper-parameters}
    backbone: Backbone = field(default_factory=Backbone)
    head: HeadSettings = field(default_factory=HeadSettings)
    memory: MemoryBudget = field(default_factory=MemoryBudget)
    train: Training = field(default_factory=Training)
    measure: Measures = field(default_factory=Measures)
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    studies: list[StudyName] = field(default_factory=list)  # further measurements: docs/studies.md
    log: list[LoggerName] = field(default_factory=list)  # where events go beside log.jsonl: docs/loggers.md
    seed: int = 0
