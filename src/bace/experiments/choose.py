"""Choose the training settings that the user of a Learner leaves unset, from only the data of a call and the memory.

- **Batches** are as large as possible with BATCHES steps per epoch. The number of **epochs** is raised until there are
  ENOUGH_STEPS steps.
- **Views** of pictures are random only if the encoder still recognises the pictures. A digit of 8 x 8 pixels that is
  mirrored, or moved by a pixel, may become another digit, but a photograph shows the same thing.
- The **learning rate** is searched. A copy of the method learns a part of the data for a few steps. The rate goes up or
  down by a factor as long as the copy recognises more of the held-out examples and of the memory.

Every choice is a function of the data and of the seed, so it is the same in every repetition.
"""

import copy
import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.config.schema import Config
from bace.core.evaluation import ENOUGH_STEPS, recognised
from bace.core.method import Method
from bace.core.stage import Stage
from bace.core.stream import Stream
from bace.core.trainer import Trainer
from bace.data.batch import MIRRORED, View
from bace.data.benchmarks import hold_out
from bace.data.modalities.image import Images
from bace.errors import TrainingError
from bace.models.encoder import Encoder
from bace.models.model import read_rows
from bace.randomness import derive, generator

BATCHES = 8  # steps of an epoch, as long as batches do not become smaller than SMALLEST
SMALLEST = 16  # examples of a batch
COMPARED, RECOGNISED = 256, 0.5  # pictures whose views are compared; the share of them that must be recognised
TRIAL_STEPS, HELD_OUT, MOST_HELD_OUT = 20, 0.2, 100  # of the rate search
FACTOR, FARTHEST = 10**0.5, 3  # between two rates; how often the rate goes up, or down
CLEARLY = 0.02  # a smaller gain in accuracy does not move the rate
FIRST_RATE = {"sgd": 3e-3}  # where the search begins; for other optimisers at the setting's default


# -- views


def choose_views(stream: Stream, encoder: Encoder) -> tuple[bool, bool] | None:
    """Whether training shows random crops of the last task's pictures, and mirrors them; None for other data. A view is
    recognised if the picture nearest to it, by the encoder's features, is the one it was made from."""
    data, examples = stream.data, stream[-1].train
    if not isinstance(data, Images):
        return None
    encoder.eval()
    examples = examples[torch.randperm(len(examples), generator=generator(0, "views"))[:COMPARED]]

    def features(view: View) -> Tensor:  # (pictures, width) of length 1
        with stream.licence("views", examples), torch.no_grad():
            parts = [read_rows(encoder, stream.batch(part, view=view))[0] for part in examples.split(2 * SMALLEST)]
        return F.normalize(torch.cat(parts), dim=1)

    def is_recognised(view: View) -> bool:
        nearest = (features(view) @ clean.T).argmax(1)
        return float((nearest == torch.arange(len(nearest))).double().mean()) >= RECOGNISED

    clean = features(None)
    data.augment, data.flip = True, torch.tensor(True)
    flip = is_recognised(MIRRORED)
    data.flip = torch.tensor(flip)
    data.augment = is_recognised(derive(0, "views"))
    return data.augment, flip and data.augment


# -- the length of training


def choose_batch_size(examples: int, most: int) -> int:
    """`most`, halved until an epoch has BATCHES steps."""
    size = most
    while size > SMALLEST and examples < size * BATCHES:
        size //= 2
    return size


def choose_epochs(steps: int, least: int) -> int:
    """The number of epochs of `steps` steps that gives ENOUGH_STEPS steps, and at least `least`."""
    return max(least, -(-ENOUGH_STEPS // max(steps, 1)))


def steps_of_epoch(method: Method, batch_size: int, examples: int) -> int:
    """The number of steps over this many new examples, together with those that the method replays."""
    method.training_settings = dataclasses.replace(method.training_settings, batch_size=batch_size)
    return -(-examples // max(batch_size - method.replay_size, 1))


# -- the learning rate


class Trial(Trainer):
    """A few steps of each stage."""

    def train(self, stage: Stage, stages: int) -> None:
        stage.epochs, stage.min_steps = min(stage.epochs, self.config.train.epochs), 0
        super().train(stage, stages)

    def batches(self, stage: Stage, examples: Tensor) -> list[Tensor]:
        return super().batches(stage, examples)[:TRIAL_STEPS]


def search_rate(method: Method, stream: Stream, config: Config) -> dict[float, float]:
    """The rates that were tried, in this order, and the share of examples that was recognised with each. It is empty if
    the method uses no rate, or if there is too little data to hold some out. `best_rate` chooses one of them."""
    task = stream[-1]
    with stream.licence("rate search", task.train):
        groups = stream.group_of(task.train)
    train, held = hold_out(task.train, groups, HELD_OUT, generator(config.seed, "rate", task.index))
    if not len(held) or method.prediction_cost(len(held)):
        return {}
    held = held[torch.randperm(len(held), generator=generator(config.seed, "held", task.index))[:MOST_HELD_OUT]]
    steps = steps_of_epoch(method, config.train.batch_size, len(train))
    train_settings = dataclasses.replace(config.train, epochs=-(-TRIAL_STEPS // steps))
    tasks = [*stream.tasks[:-1], dataclasses.replace(task, train=train)]

    def worth(rate: float) -> float | None:  # None: there is nothing to optimise
        shown = Stream(stream.data, stream.targets, tasks, stream.names, stream.device, stream.forgotten)
        settings = dataclasses.replace(config, train=dataclasses.replace(train_settings, lr=rate))
        copied = copied_method(method, shown)
        copied.training_settings = settings.train
        trial = Trial(copied, shown, settings)
        try:
            trial.learn(shown[-1])
        except TrainingError:
            return 0.0
        return knowledge(copied, held, method.remembered()) if trial.optimised else None

    first = worth(start := FIRST_RATE.get(config.train.optimiser, config.train.lr))
    if first is None:
        return {}
    tried = {start: first}
    for factor in (1 / FACTOR, FACTOR):
        best = best_rate(tried)
        for _ in range(FARTHEST):
            rate = float(f"{best * factor:.2g}")
            tried[rate] = worth(rate) or 0.0
            if best_rate(tried) != rate:
                break
            best = rate
    return tried


def best_rate(tried: dict[float, float]) -> float:
    """The best rate. Among rates that are about equally good, it is the one that was tried first."""
    most = max(tried.values())
    return next(rate for rate, worth in tried.items() if worth > most - CLEARLY)


def knowledge(method: Method, new: Tensor, old: Tensor) -> float:
    """The mean of the recognised shares of new and, if there are any, old examples."""
    with method.stream.licence("what was learned", torch.cat([new, old])):
        shares = [recognised(method, ids) for ids in (new, torch.unique(old))]
    known = [share for share in shares if share is not None]
    return sum(known) / max(len(known), 1)


def copied_method(method: Method, stream: Stream) -> Method:
    """A copy of a method on another stream, with its own position."""
    apart = {id(method.stream): stream, id(method.now): dataclasses.replace(method.now)}
    copied: Method = copy.deepcopy(method, apart)
    return copied
