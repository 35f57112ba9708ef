"""Formulas that several methods share, each with its equation."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from bace.methods.parts.neighbours import Neighbourhood


def distillation(
    student: Tensor,  # (rows, classes) logits
    log_teacher: Tensor,  # (rows, old) log-probabilities of the teacher over the old classes, at temperature `tau`
    *,
    mode: Literal["slice", "renorm"] = "renorm",
    direction: Literal["forward", "reverse"] = "forward",
    tau: float = 1.0,
    reduction: Literal["batchmean", "mean"] = "batchmean",
    weights: Tensor | None = None,  # (rows,) weight of each row; default: 1
) -> Tensor:  # ()
    """The divergence of student P and teacher P0 over the teacher's columns, as a mean over rows.

    `forward`: KL(P0 || P) = sum_c P0_c (log P0_c - log P_c).  `reverse`: KL(P || P0) = sum_c P_c (log P_c - log P0_c).
    `renorm`: P = softmax(z_old / tau), renormalised over the old columns (LwF, BiC).
    `slice`: P = softmax(z / tau) over all columns, sliced to the old ones, so that it also acts on their mass m:
    forward it equals renorm - log m, reverse m renorm + m log m (docs/bace.md, 3.1).
    For tau != 1 the value is multiplied by tau^2. `mean` also divides by the number of old columns.
    """
    old = log_teacher.shape[1]
    scaled = student / tau
    log_student = F.log_softmax(scaled, 1)[:, :old] if mode == "slice" else F.log_softmax(scaled[:, :old], 1)
    # kl_div(log q, p) = p (log p - log q), which is 0 for p = 0; but its gradient with respect to that p is not finite
    least = math.log(torch.finfo(student.dtype).tiny)
    log_q, p = log_student, log_teacher.exp()
    if direction == "reverse":
        log_q, p = log_teacher, log_student.clamp_min(least).exp()
    if weights is None:
        total = F.kl_div(log_q, p, reduction="sum") * tau**2
    else:
        total = (weights * F.kl_div(log_q, p, reduction="none").sum(1)).sum() * tau**2
    return total / (len(student) * (old if reduction == "mean" else 1))


def soft_cross_entropy(
    student: Tensor,  # (rows, classes) logits
    teacher: Tensor,  # (rows, classes) logits, of the same classes
    tau: float = 1.0,
) -> Tensor:  # ()
    """KD(z, z'; T): mean over rows of -sum_c softmax(z'/T)_c log softmax(z/T)_c, without a factor T^2.

    The gradient equals that of KL(teacher || student); the value is larger by the teacher's entropy."""
    return -(F.softmax(teacher.detach() / tau, 1) * F.log_softmax(student / tau, 1)).sum(1).mean()


def feature_cosine(
    student: Tensor,  # (rows, width)
    teacher: Tensor,  # (rows, width)
) -> Tensor:  # ()
    """Mean over rows of 1 - cos(h, h'): it preserves the direction of a feature, not its length (LUCIR, PODNet)."""
    return (1 - F.cosine_similarity(student, teacher.detach(), dim=-1)).mean()


def margin_ranking(
    scores: Tensor,  # (rows, classes), not scaled
    targets: Tensor,  # (rows,)
    old: int,  # number of old classes
    *,
    k: int,
    margin: float,
) -> Tensor:  # ()
    """The mean of max(0, margin - s_y + s_j) over the rows of old classes and over the (at most) k new classes j with
    the highest score (LUCIR). 0 if no row belongs to an old class."""
    mine = targets < old
    true = scores.gather(1, targets[:, None])
    hardest = scores[:, old:].topk(min(k, scores.shape[1] - old), dim=1).values
    # weights instead of a selection of rows, because only the device knows their number
    return (mine[:, None] * F.relu(margin - true + hardest)).sum() / (mine.sum() * hardest.shape[1]).clamp(min=1)


def nca(
    logits: Tensor,  # (rows, classes)
    targets: Tensor,  # (rows,)
    margin: Tensor | float | None = None,
) -> Tensor:  # ()
    """PODNet's classification loss. With a `margin` (of scaled scores) it is as in the paper: mean over rows of
    max(0, -(z_y - margin) + log sum_{j != y} exp(z_j)).

    Without a margin it is as in the code, which subtracts the margin from all scores, so that it cancels out, and where
    the excluded true class still adds exp(0): mean of -u_y + log(1 + sum_{j != y} exp(u_j)), u = z - max_j z_j.
    """
    true = F.one_hot(targets, logits.shape[1]).bool()
    if margin is None:
        u = logits - logits.max(1, keepdim=True).values
        return (u.masked_fill(true, 0.0).logsumexp(1) - u.gather(1, targets[:, None])[:, 0]).mean()
    own = logits.gather(1, targets[:, None])[:, 0]
    return F.relu(logits.masked_fill(true, -torch.inf).logsumexp(1) - (own - margin)).mean()


def pooled_distance(
    student: Tensor,  # (examples, any)
    teacher: Tensor,  # (examples, any)
) -> Tensor:  # ()
    """Mean over examples of | a/|a| - a'/|a'| |, for the pooled outputs of a layer (PODNet's POD-spatial)."""
    difference = F.normalize(student, dim=1) - F.normalize(teacher.detach(), dim=1)
    distance: Tensor = torch.linalg.vector_norm(difference, dim=1)  # a task starts at 0, where the gradient is 0
    return distance.mean()


def mixture(
    logits: Tensor,  # (rows, classes) of the anchors
    beside: Tensor,  # (passed, classes) of their neighbours
    near: Neighbourhood,
) -> Tensor:  # (rows, classes)
    """W_0 S(x) + sum_j W_j S(x_j): the probabilities that a row and its neighbours predict jointly (DDE, BaCE)."""
    mixed = near.log_weights.exp()[:, :, None] * F.softmax(beside, 1)[near.position]  # (rows, K, classes)
    return near.log_weight_anchor.exp()[:, None] * F.softmax(logits, 1) + mixed.sum(1)


def mixture_nll(
    log_anchor: Tensor,  # (rows,) log S(x)[y] of the anchors
    log_neighbours: Tensor,  # (rows, K) log S(x_j)[y] of their neighbours, for the anchor's label
    log_weight_anchor: Tensor,  # (rows,) log W(x, x)
    log_weights: Tensor,  # (rows, K) log W(x_j, x); -inf where there is no neighbour
) -> Tensor:  # ()
    """Mean over rows of -log(W_0 S(x)[y] + sum_j W_j S(x_j)[y]), in the log domain so that it never underflows."""
    terms = torch.cat([(log_weight_anchor + log_anchor)[:, None], log_weights + log_neighbours], dim=1)
    return -torch.logsumexp(terms, dim=1).mean()


def neighbour_log_weights(
    distances: Tensor,  # (rows, K); inf where there is no neighbour
    anchor_weight: float,  # W_0
    *,
    uniform: bool = False,
) -> tuple[Tensor, Tensor]:  # (rows,) log W(x, x), (rows, K) log W(x_j, x)
    """W_0 for the anchor and (1 - W_0) (1/d_j) / sum_i (1/d_i) for its neighbours (docs/bace.md 2).

    Distances are clamped at 1e-6, so a duplicate takes nearly all of 1 - W_0 instead of causing a division by zero. A
    row without neighbours is predicted alone: W_0 = 1.
    """
    closeness = torch.zeros_like(distances) if uniform else -torch.log(distances.clamp(min=1e-6))
    closeness = closeness.masked_fill(torch.isinf(distances), -math.inf)
    alone = torch.isinf(distances).all(dim=1)
    share = torch.log_softmax(closeness, dim=1).masked_fill(alone[:, None], -math.inf)
    rest = math.log1p(-anchor_weight) if anchor_weight < 1 else -math.inf
    own = math.log(anchor_weight) if anchor_weight > 0 else -math.inf
    return torch.full_like(share[:, 0], own).masked_fill(alone, 0.0), share + rest


def old_logit_mse(
    student: Tensor,  # (rows, classes) logits
    teacher: Tensor,  # (rows, old) logits, detached
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:  # ()
    """(z_old - z0_old)^2 over the teacher's columns: mean over rows and columns, or (`sum`) over rows only."""
    difference = (student[:, : teacher.shape[1]] - teacher) ** 2
    return difference.mean() if reduction == "mean" else difference.sum(1).mean()


def supervised_contrast(
    embeddings: Tensor,  # (rows, width), of length 1
    targets: Tensor,  # (rows,)
    anchors: Tensor,  # (rows,) bool
    *,
    tau: float,
    base: float = 0.07,
) -> Tensor:  # ()
    """Co2L's asymmetric contrast: tau/base times the mean over all rows i, where rows that are not anchors count 0, of
    -mean over p (same label, p != i) of log( exp(u_i.u_p / tau) / sum_{a != i} exp(u_i.u_a / tau) ).

    If all rows are anchors, it is Khosla et al.'s supervised contrast. A row without another row of its label counts
    0."""
    positive = (targets[:, None] == targets).fill_diagonal_(False)
    log_share = _log_shares(embeddings, tau).masked_fill(~positive, 0.0)
    mean = log_share.sum(1) / positive.sum(1).clamp(min=1)
    return -tau / base * (mean * anchors).mean()


def relation_distillation(
    student: Tensor,  # (rows, width), of length 1
    teacher: Tensor,  # (rows, width), of length 1
    *,
    kappa: float,
    kappa_teacher: float,
) -> Tensor:  # ()
    """Co2L's instance-wise relations: mean over rows i of -sum_{a != i} p'_ia log p_ia, where p_i = softmax over a != i
    of u_i.u_a / kappa, and p' is the teacher's at its own temperature."""
    wanted = _log_shares(teacher.detach(), kappa_teacher).exp()
    itself = torch.eye(len(student), dtype=torch.bool, device=student.device)
    return -(wanted * _log_shares(student, kappa).masked_fill(itself, 0.0)).sum(1).mean()


def _log_shares(embeddings: Tensor, tau: float) -> Tensor:  # (rows, width) -> (rows, rows)
    """log softmax over a != i of u_i.u_a / tau; -inf on the diagonal."""
    itself = torch.eye(len(embeddings), dtype=torch.bool, device=embeddings.device)
    return F.log_softmax((embeddings @ embeddings.T / tau).masked_fill(itself, -torch.inf), 1)
