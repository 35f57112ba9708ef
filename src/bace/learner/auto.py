"""The method that `Learner("auto")` chooses: the best on our small sets of the modality, by examples of each class.

benchmarks/auto.py measured the numbers, and a test compares them with benchmarks/auto.json. A number is the mean score
over the calls, averaged over the sets, in percent. All candidates can also learn more examples of known classes and
forget a class, because later calls may ask for both.
"""

from collections.abc import Mapping
from typing import Any

from bace.config.parse import flatten

AUTO = "auto"
CANDIDATES: dict[str, dict[str, Any]] = {
    "SimpleCIL": {"name": "SimpleCIL"},
    "FeCAM": {"name": "FeCAM"},
    "SLDA": {"name": "SLDA", "forgettable": True},
    "FeCAM(alpha1=10)": {"name": "FeCAM", "alpha1": 10.0},  # more shrinkage, for covariances of few examples
    "SLDA(eps=0.01)": {"name": "SLDA", "eps": 0.01, "forgettable": True},
    "ER": {"name": "ER"},
    "ExtendNER": {"name": "ExtendNER"},
}
TRAINED = {"ER", "ExtendNER"}
MARGIN = 2.0  # the points by which a method that trains, which takes minutes instead of seconds, must be better
MEASURED: dict[str, dict[int, dict[str, float]]] = {  # by modality and examples of each class
    "image": {
        8: {
            "SimpleCIL": 74.1,
            "FeCAM": 74.6,
            "SLDA": 67.6,
            "FeCAM(alpha1=10)": 74.9,
            "SLDA(eps=0.01)": 71.4,
            "ACIL": 73.7,
        },
        30: {
            "SimpleCIL": 78.5,
            "FeCAM": 79.5,
            "SLDA": 68.1,
            "FeCAM(alpha1=10)": 79.8,
            "SLDA(eps=0.01)": 70.0,
            "ACIL": 76.6,
        },
        100: {
            "SimpleCIL": 80.3,
            "FeCAM": 84.8,
            "SLDA": 79.6,
            "FeCAM(alpha1=10)": 84.6,
            "SLDA(eps=0.01)": 81.6,
            "ACIL": 81.2,
            "ER": 85.6,
        },
    },
    "text": {
        8: {
            "SimpleCIL": 86.2,
            "FeCAM": 82.8,
            "SLDA": 78.6,
            "FeCAM(alpha1=10)": 83.6,
            "SLDA(eps=0.01)": 82.6,
            "ACIL": 83.4,
        },
        30: {
            "SimpleCIL": 89.2,
            "FeCAM": 86.7,
            "SLDA": 84.3,
            "FeCAM(alpha1=10)": 89.6,
            "SLDA(eps=0.01)": 89.8,
            "ACIL": 87.0,
        },
        100: {
            "SimpleCIL": 88.6,
            "FeCAM": 87.2,
            "SLDA": 86.5,
            "FeCAM(alpha1=10)": 89.6,
            "SLDA(eps=0.01)": 90.3,
            "ACIL": 90.3,
            "ER": 88.6,
        },
    },
    "token": {
        8: {
            "SimpleCIL": 18.0,
            "FeCAM": 15.1,
            "SLDA": 11.4,
            "FeCAM(alpha1=10)": 23.7,
            "SLDA(eps=0.01)": 20.0,
            "ACIL": 13.8,
            "ER": 26.6,
            "ExtendNER": 30.3,
        },
        30: {
            "SimpleCIL": 19.9,
            "FeCAM": 21.9,
            "SLDA": 24.6,
            "FeCAM(alpha1=10)": 29.4,
            "SLDA(eps=0.01)": 29.3,
            "ACIL": 19.2,
            "ER": 32.0,
            "ExtendNER": 35.1,
        },
        100: {
            "SimpleCIL": 19.4,
            "FeCAM": 35.8,
            "SLDA": 33.3,
            "FeCAM(alpha1=10)": 31.7,
            "SLDA(eps=0.01)": 34.1,
            "ACIL": 23.0,
            "ER": 38.4,
            "ExtendNER": 46.1,
        },
    },
}


def choose_method(modality: str, examples: float) -> tuple[dict[str, Any], str]:
    """The settings of the best method for this number of examples of each class, and the reason in one line. The
    measured size with the nearest ratio decides. A modality without measurements gets SimpleCIL."""
    if modality not in MEASURED:
        return CANDIDATES["SimpleCIL"], f"SimpleCIL, as no method was measured on {modality} data"
    measured = MEASURED[modality]
    size = min(measured, key=lambda n: max(n / examples, examples / n))
    scores = {name: score for name, score in measured[size].items() if name in CANDIDATES}
    best = max(scores, key=lambda name: scores[name] - MARGIN * (name in TRAINED))
    others = ", ".join(f"{name} {score:.1f}" for name, score in scores.items() if name != best)
    which = "which is best" if scores[best] == max(scores.values()) else "which is nearly best, and fast,"
    return CANDIDATES[best], (
        f"{best}, {which} on our {modality} sets with {size} examples of each class ({scores[best]:.1f}; {others})"
    )


def settled(given: Mapping[str, Any], method: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a user gave, flat, with this method in place of "auto"."""
    flat = flatten(given)
    if flat["method.name"] != AUTO:
        return flat
    return {key: value for key, value in flat.items() if key != "method.name"} | flatten({"method": method})
