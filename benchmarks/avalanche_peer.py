"""Run methods of avalanche-lib on given pictures, in the environment that peers.py makes, without bace.

    python avalanche_peer.py '[{"method": "ER", ...}, ...]'

prints [{"accuracy": [...], "seconds": [...], "steps": n, "peak_memory_mb": n}, ...]: for each job a value per seed, and
the peak memory of the process so far.
"""

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

# torchvision's compiled part does not load with a CPU build of torch, and importing torchvision looks for these two
# operators
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
warnings.filterwarnings("ignore")

from avalanche.benchmarks import nc_benchmark  # noqa: E402
from avalanche.models import IncrementalClassifier  # noqa: E402
from avalanche.training.plugins import EWCPlugin, LwFPlugin, ReplayPlugin  # noqa: E402
from avalanche.training.storage_policy import ClassBalancedBuffer  # noqa: E402
from avalanche.training.supervised import DER, ICaRL, Naive  # noqa: E402
from torchvision import transforms  # noqa: E402
from transformers import ViTModel  # noqa: E402


class Pictures(torch.utils.data.Dataset):
    def __init__(self, pixels: Tensor, targets: Tensor) -> None:
        self.pixels, self.targets = pixels, targets.tolist()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.pixels[index], self.targets[index]


class Features(nn.Module):
    """The class token."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.vit = ViTModel.from_pretrained(folder, add_pooling_layer=False)

    def forward(self, values: Tensor) -> Tensor:
        return self.vit(pixel_values=values).last_hidden_state[:, 0]


class Network(nn.Module):
    def __init__(self, features: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.features, self.classifier = features, classifier

    def forward(self, values: Tensor) -> Tensor:
        return self.classifier(self.features(values))


def views(job: dict[str, Any]) -> tuple[transforms.Compose, transforms.Compose]:
    """The transforms of training and of test."""
    side = job["side"]
    random = [transforms.RandomCrop(side, padding=job["padding"])] if job["padding"] else []
    random += [transforms.RandomHorizontalFlip()] if job["flip"] else []
    scaled = [transforms.ConvertImageDtype(torch.float32)]
    if side != job["size"]:
        bicubic = transforms.InterpolationMode.BICUBIC
        scaled += [transforms.Resize(job["size"], bicubic, antialias=True)]
    scaled += [transforms.Normalize(job["mean"], job["std"])]
    return transforms.Compose([*random, *scaled]), transforms.Compose(scaled)


def strategy(job: dict[str, Any], width: int, classes: int) -> Any:
    method, batch = job["method"], job["batch"]
    features = Features(job["model"])
    fixed = method in ("DER++", "iCaRL")  # neither works with a head that grows
    head = nn.Linear(width, classes) if fixed else IncrementalClassifier(width, initial_out_features=1)
    model = Network(features, head)
    optimiser = torch.optim.SGD(model.parameters(), lr=job["lr"], momentum=job["momentum"])
    common = {"train_mb_size": batch, "eval_mb_size": 128, "train_epochs": job["epochs"], "evaluator": None}
    if method == "iCaRL":
        herded = {"memory_size": job["memory"], "buffer_transform": None, "fixed_memory": True}
        return ICaRL(feature_extractor=features, classifier=head, optimizer=optimiser, **herded, **common)
    common |= {"model": model, "optimizer": optimiser}
    if method == "DER++":
        weights = {"alpha": job["alpha"], "beta": job["beta"]}
        return DER(mem_size=job["memory"], batch_size_mem=batch // 2, **weights, **common)
    kept = ClassBalancedBuffer(job["memory"])
    plugins = {
        "SEQ": lambda: [],
        "ER": lambda: [ReplayPlugin(job["memory"], batch // 2, batch // 2, storage_policy=kept)],
        "LwF": lambda: [LwFPlugin(alpha=job["lambda_kd"], temperature=2)],
        "EWC": lambda: [EWCPlugin(job["lambda_ewc"] / 2, mode="online", decay_factor=1.0)],
    }
    return Naive(plugins=plugins[method](), **common)


def accuracy(model: nn.Module, pixels: Tensor, targets: Tensor, view: Any) -> float:
    model.eval()
    with torch.inference_mode():
        parts = [model(view(part)).argmax(1) for part in pixels.split(128)]
    return 100 * float((torch.cat(parts) == targets).float().mean())


def run(job: dict[str, Any], seed: int) -> tuple[float, float, int]:
    """The mean accuracy over tasks after the last one, the seconds of learning, and the steps."""
    stored = np.load(job["data"])
    pixels, targets, train, test = (torch.from_numpy(stored[name]) for name in ("pixels", "targets", "train", "test"))
    pixels = pixels.expand(-1, 3, -1, -1).contiguous()
    classes = int(targets.max()) + 1
    shown, clean = views(job)
    benchmark = nc_benchmark(
        Pictures(pixels[train], targets[train]),
        Pictures(pixels[test], targets[test]),
        n_experiences=job["tasks"],
        task_labels=False,
        fixed_class_order=list(range(classes)),
        train_transform=shown,
        eval_transform=clean,
    )
    torch.manual_seed(seed)
    made = strategy(job, job["width"], classes)
    seconds = 0.0
    for experience in benchmark.train_stream:
        if job["method"] == "DER++" and experience.current_experience:  # then half of a batch is replayed
            made.train_mb_size = job["batch"] // 2
        begun = time.process_time()
        made.train(experience)
        seconds += time.process_time() - begun
    per_task = classes // job["tasks"]
    tasks = [test[targets[test] // per_task == t] for t in range(job["tasks"])]
    scores = [accuracy(made.model, pixels[ids], targets[ids], clean) for ids in tasks]
    return sum(scores) / len(scores), seconds, made.clock.train_iterations


def peak_memory() -> int:
    """The peak memory of this process, in MB."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024


def main() -> None:
    torch.set_num_threads(1)
    results = []
    for job in json.loads(sys.argv[1]):
        runs = [run(job, seed) for seed in job["seeds"]]
        result = {"accuracy": [r[0] for r in runs], "seconds": [r[1] for r in runs], "steps": runs[0][2]}
        results.append({**result, "peak_memory_mb": peak_memory()})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
