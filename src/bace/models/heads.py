"""Classifiers that grow by a block of rows per task, so that old rows stay the same parameters."""

import copy
import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Head(nn.Module):
    """The base of all heads: `blocks` has one parameter (classes of a task, width) per task."""

    optimiser_group = "head"  # learns at train.head_lr

    no_rows: Tensor  # (0, width), where the rows will be

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ParameterList()
        self.register_buffer("no_rows", torch.zeros(0, width), persistent=False)

    @property
    def classes(self) -> int:
        return sum(self.sizes)

    @property
    def weight(self) -> Tensor:  # (classes, width)
        return torch.cat(list(self.blocks)) if len(self.blocks) else self.no_rows

    def grow(self, classes: int, generator: torch.Generator) -> None:
        """Append rows drawn uniformly from ±1/sqrt(width); existing rows do not change."""
        bound = 1 / math.sqrt(self.width)
        rows = torch.empty(classes, self.width).uniform_(-bound, bound, generator=generator)
        self.blocks.append(nn.Parameter(rows.to(self.no_rows.device)))

    def freeze_old(self) -> None:
        """From now on, train only the newest task's rows and what all rows share (a cosine head's scale)."""
        for parts in self.children():
            for old in list(parts)[:-1] if isinstance(parts, nn.ParameterList) else ():
                old.requires_grad_(False)

    @torch.no_grad()
    def imprint(self, rows: Tensor) -> None:  # (classes or rows of the newest task, width)
        """Start the newest rows from data; a row of zeros (a class without examples) keeps its random start."""
        newest = self.blocks[-1]
        rows = rows.to(newest.device).repeat_interleave(len(newest) // len(rows), 0)
        newest.copy_(torch.where(rows.any(1, keepdim=True), rows, newest))

    @torch.no_grad()
    def forget_classes(self, classes: Iterable[int]) -> None:
        """Remove these classes, as far as the head has them: their rows become a constant. (They do not become zeros,
        because the gradient of a cosine is not defined there.)"""
        proxies = sum(self.sizes) // max(self.classes, 1)  # rows of a class
        rows = {c * proxies + i for c in classes for i in range(proxies)}
        for name, parts in self.named_children():
            start = 0
            for part in parts if isinstance(parts, nn.ParameterList) else ():
                own = [row - start for row in sorted(rows) if start <= row < start + len(part)]
                part[own] = 1 / math.sqrt(self.width) if name == "blocks" else 0.0
                start += 0 if name == "columns" else len(part)

    def products(self, features: Tensor, rows: Tensor) -> Tensor:  # (..., width), (classes, width) -> (..., classes)
        """<features, row>. The CPU multiplies block by block, because rounding depends on the size of a product, and
        old logits must not change by a bit when the head grows. An accelerator would take too long to start many small
        products."""
        if not len(self.blocks) or features.device.type != "cpu":
            return F.linear(features, rows)
        return torch.cat([F.linear(features, part) for part in rows.split(self.sizes)], -1)

    def merged(self) -> "Head":
        """A copy with one block for all tasks. It gives the same logits, except for rounding, in one product."""
        head = copy.deepcopy(self)
        for name, parts in self.named_children():
            if isinstance(parts, nn.ParameterList) and len(parts):
                setattr(head, name, nn.ParameterList([nn.Parameter(torch.cat([p.detach() for p in parts]))]))
        return head

    @property
    def sizes(self) -> list[int]:
        """The number of rows of each block."""
        return [len(block) for block in self.blocks]


class LinearHead(Head):
    """z = W h + b.

    Args:
        bias: whether there is a b; it starts at zero.
        zero: whether W starts at zero too.
    """

    def __init__(self, width: int, *, bias: bool = True, zero: bool = False) -> None:
        super().__init__(width)
        self.biases = nn.ParameterList()
        self.has_bias, self.zero = bias, zero

    def grow(self, classes: int, generator: torch.Generator) -> None:
        super().grow(classes, generator)
        if self.zero:
            nn.init.zeros_(self.blocks[-1])
        if self.has_bias:
            self.biases.append(nn.Parameter(torch.zeros(classes, device=self.blocks[-1].device)))

    @property
    def bias(self) -> Tensor:  # (classes,)
        return torch.cat(list(self.biases)) if len(self.biases) else self.no_rows[:, 0]

    def forward(self, features: Tensor) -> Tensor:  # (rows, width) -> (rows, classes)
        logits = self.products(features, self.weight)
        return logits + self.bias if len(self.biases) else logits

    def of(self, task: int) -> list[nn.Parameter]:
        """A task's block as a separate head."""
        return [self.blocks[task], self.biases[task]]


class WideningHead(LinearHead):
    """z = W h + b over features that grow by a branch with every task (MEMO, BEEF, FOSTER's teacher).

    W is a staircase of parameters whose shapes never change: a task's rows cover the features that existed at its start
    (`blocks`), and the weights of all earlier rows on a later branch are a separate parameter (`columns`). New columns
    start at zero, so old logits do not change.

    Args:
        width: the width of one branch.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.branch = width
        self.columns = nn.ParameterList()  # (classes before, branch) for each task after the first
        self.auxiliary: LinearHead | None = None  # on the newest branch; helps in training only

    @property
    def weight(self) -> Tensor:  # (classes, width)
        if not len(self.blocks):
            return self.no_rows
        first, *later = self.blocks
        weight: Tensor = first
        for right, below in zip(self.columns, later, strict=True):
            weight = torch.cat([weight, right], 1)
            weight = torch.cat([weight, F.pad(below, (weight.shape[1] - below.shape[1], 0))])
        return weight

    def grow(self, classes: int, generator: torch.Generator, newest_only: bool = False) -> None:
        """Add a branch (except the first time) and the rows of a task, which read all branches or only the newest."""
        if len(self.blocks):
            self.columns.append(nn.Parameter(torch.zeros(self.classes, self.branch, device=self.no_rows.device)))
        width = self.branch * len(self.blocks) + self.branch
        self.width = self.branch if newest_only else width  # of the rows that are drawn
        super().grow(classes, generator)
        self.width = width

    def forget_classes(self, classes: Iterable[int]) -> None:
        """The whole auxiliary head is removed: the next task makes a new one, and predictions do not read it."""
        super().forget_classes(classes)
        if self.auxiliary is not None:
            self.auxiliary.forget_classes(range(self.auxiliary.classes))

    def assist(self, outputs: int, generator: torch.Generator) -> None:
        """Replace the auxiliary head by a new one."""
        self.auxiliary = LinearHead(self.branch).to(self.no_rows.device)
        self.auxiliary.grow(outputs, generator)


class AugmentedHead(LinearHead):
    """A linear head over more labels than classes: view k of class c is label `views` c + k (PASS).

    As a classifier it gives the logits of the classes in view 0; `all` gives those of every label.
    """

    def __init__(self, width: int, views: int) -> None:
        super().__init__(width)
        self.views = views

    @property
    def classes(self) -> int:
        return super().classes // self.views

    def grow(self, classes: int, generator: torch.Generator) -> None:
        super().grow(self.views * classes, generator)

    def all(self, features: Tensor) -> Tensor:  # (rows, width) -> (rows, views * classes)
        return super().forward(features)

    def forward(self, features: Tensor) -> Tensor:  # (rows, width) -> (rows, classes)
        return self.all(features)[:, :: self.views]


class CosineHead(Head):
    """z_c = sigma <h/|h|, w_c/|w_c|> with one learned sigma for all classes (LUCIR's layer; docs/bace.md 1).

    Args:
        sigma_init: the initial scale. In a few epochs it does not move far, and a scale of 1 cannot express a confident
            prediction among 100 classes.
        sigma_learn: whether the scale is trained.
    """

    def __init__(self, width: int, sigma_init: float = 10.0, sigma_learn: bool = True) -> None:
        super().__init__(width)
        self.sigma = nn.Parameter(torch.tensor(float(sigma_init)), requires_grad=sigma_learn)

    def forward(self, features: Tensor) -> Tensor:  # (rows, width) -> (rows, classes)
        unit = F.normalize(features, dim=-1, eps=1e-12)
        return self.sigma * self.products(unit, F.normalize(self.weight, dim=-1, eps=1e-12))


class ProxyHead(CosineHead):
    """z_c = sigma sum_p softmax(s_c)_p s_cp with s_cp = -|h/|h| - w_cp/|w_cp||^2 = 2 cos - 2: several rows, called
    proxies, for every class (PODNet's layer, whose similarity is the negative squared distance of unit vectors).

    Args:
        proxies: the number of proxies per class, which are neighbouring rows of its block.
    """

    def __init__(self, width: int, proxies: int, sigma_init: float = 10.0, sigma_learn: bool = True) -> None:
        super().__init__(width, sigma_init, sigma_learn)
        self.proxies = proxies

    @property
    def classes(self) -> int:
        return super().classes // self.proxies

    def grow(self, classes: int, generator: torch.Generator) -> None:
        super().grow(classes * self.proxies, generator)

    def forward(self, features: Tensor) -> Tensor:  # (rows, width) -> (rows, classes)
        unit = F.normalize(features, dim=-1, eps=1e-12)
        cosines = self.products(unit, F.normalize(self.weight, dim=-1, eps=1e-12))
        similarities = 2 * cosines.reshape(*cosines.shape[:-1], self.classes, self.proxies) - 2
        return self.sigma * (similarities.softmax(-1) * similarities).sum(-1)


@torch.no_grad()
def align(head: Head) -> None:
    """Weight alignment: scale the newest rows so that their mean norm equals that of the earlier rows (Zhao et al.,
    Maintaining Discrimination and Fairness in Class Incremental Learning, CVPR 2020)."""
    norms = head.weight.norm(dim=1)
    new = len(head.blocks[-1])
    head.blocks[-1].mul_(norms[:-new].mean() / norms[-new:].mean())


def imprint(
    features: Tensor,  # (rows, width) of one task's training data, clean view
    targets: Tensor,  # (rows,) class ids, on the CPU
    classes: range,  # the task's
    old_rows: Tensor,  # (old classes, width)
) -> Tensor:  # (len(classes), width)
    """Rows made from data: the mean of a class's normalised features, at the mean norm of the old rows (LUCIR)."""
    unit = F.normalize(features, dim=-1)
    norm = old_rows.norm(dim=1).mean() if len(old_rows) else torch.tensor(1.0)
    rows = [unit[targets == c].mean(0) if (targets == c).any() else unit.new_zeros(unit.shape[1]) for c in classes]
    return F.normalize(torch.stack(rows), dim=-1) * norm


def kmeans(
    points: Tensor,  # (points, width), on the CPU: the generator is there, and every round looks at numbers
    count: int,
    generator: torch.Generator,
    steps: int = 100,
) -> Tensor:  # (count, width)
    """The centres of `count` clusters, seeded as in k-means++ (Arthur and Vassilvitskii, SODA 2007) and then moved by
    Lloyd's steps until they stay. With fewer distinct points, each is a centre, some twice; without points, all are 0.

    (scikit-learn adds up in the order in which threads finish, so two runs may differ in the last bit.)"""
    if not len(points):
        return points.new_zeros(count, points.shape[1])
    seeds = torch.randint(len(points), (1,), generator=generator)
    while len(seeds) < count:
        away = _distances(points, points[seeds]).min(1).values.square()
        if not away.any():
            break
        seeds = torch.cat([seeds, torch.multinomial(away, 1, generator=generator)])
    centres = points[seeds]
    for _ in range(steps):
        own = F.one_hot(_distances(points, centres).argmin(1), len(centres)).to(points.dtype)  # (points, centres)
        moved = torch.where(own.any(0)[:, None], own.T @ points / own.sum(0).clamp(min=1)[:, None], centres)
        if torch.equal(moved, centres):
            break
        centres = moved
    return centres[torch.arange(count) % len(centres)]


def _distances(a: Tensor, b: Tensor) -> Tensor:  # (a, width), (b, width) -> (a, b)
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")  # 0 for equal points, not nearly 0
