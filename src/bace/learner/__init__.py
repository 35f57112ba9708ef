"""Class-incremental learning on your own data: partial_fit, predict, save, load. Old data may be deleted in between."""

from __future__ import annotations

import copy
import logging
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from huggingface_hub import ModelHubMixin, snapshot_download
from torch import Tensor

from bace import methods
from bace.config.parse import config_from, current, flatten, import_named_method
from bace.config.schema import Config
from bace.core import checkpoint
from bace.core.calibration import finite
from bace.core.method import Method
from bace.core.resources import check_resources
from bace.core.stream import Stream, Task
from bace.core.trainer import Trainer
from bace.data.batch import NO_IDS
from bace.data.decode import PictureOptions
from bace.data.files import some
from bace.data.modalities import MODALITIES
from bace.data.modalities.token import Span, Token
from bace.data.modality import Modality, Table, is_whole, listed
from bace.data.settings import data_settings
from bace.data.table import as_inputs, as_labels, from_arrays, from_records, read
from bace.errors import CheckpointError, ConfigError, DataError, closest_name
from bace.experiments import choose
from bace.experiments.assemble import check_memory, load_backbone, method_on
from bace.experiments.run_folder import read_model
from bace.files import check_format, typed
from bace.learner.auto import AUTO, CANDIDATES, choose_method, settled
from bace.learner.card import write_cards
from bace.learner.history import as_table, take_stock, tell, without_class
from bace.learner.saved import CHOSEN, FORMAT, VIEWS, Saved
from bace.models.allocation import return_freed_memory
from bace.models.backbones import OWN
from bace.models.encoder import Encoder
from bace.models.loading import encoder_modality
from bace.models.packing import Packed, pack, unpack
from bace.progress import bar, quiet

if TYPE_CHECKING:
    from typing import Self

UNKNOWN = "unknown"
LARGER = 4  # a model that learns may need this many times the numbers in its file: teachers, for example, are not saved


class Learner(ModelHubMixin):
    """A classifier that learns new classes, call by call.

    >>> learner = Learner(backbone="google/vit-base-patch16-224", memory=500)
    >>> learner.partial_fit(pictures, labels)        # then delete them
    >>> learner.partial_fit(new_pictures, new_labels)
    >>> learner.predict(more_pictures)

    Args:
        method: "auto", a name from `bace list methods`, a dict with hyper-parameters ({"name": "bace", "alpha": 2}),
            or "package.Class". "auto" chooses the method that was best on small sets like the first call's data.
        settings: any setting of `bace run`, nested or dotted: `memory=500`, `backbone="minilm"`,
            `train={"epochs": 3}`, `seed=1`.

    The learner stores the examples in memory (joint methods store all examples), so it needs no other data later.
    """

    def __init__(self, method: str | dict[str, Any] = AUTO, **settings: Any) -> None:
        self._given = {"method": method, **settings}
        self._auto: dict[str, Any] = {}  # the method that was chosen at the first call
        import_named_method(self._settings())
        config_from(self._settings())  # refuses wrong settings now, not at the first call
        self.config: Config | None = None
        self.tasks: list[list[str | None]] = []  # class names, by task; None: forgotten
        self.picture: tuple[int, int] | None = None  # height and width of the pictures learned from
        self._numbers: set[str] = set()  # names that are returned as whole numbers: all, or none
        self._guessed = False  # whether these were read from a CSV file, which does not say that they are numbers
        self.modality: str | None = None
        self.method: Method | None = None
        self._kept: dict[str, Tensor] = {}  # raw examples, as tensors
        self._kept_targets = NO_IDS
        self._train: list[Tensor] = []  # ids of each task's kept training examples
        self._views: dict[str, Any] = {}  # settings that were chosen at the first call
        self._chosen: dict[str, Any] = {}  # `_views` and the settings that were chosen at the last call
        self.history_: list[dict[str, Any]] = []  # for each call: its data, the chosen settings, the result
        self._temperature = 1.0
        self._packed: Packed | None = None  # the encoder as it was before the first call, without its weights
        self._hub_mixin_config = None  # otherwise ModelHubMixin would write the settings into another file
        self._complete = True  # False: made from a run, whose memory examples are elsewhere

    @property
    def classes_(self) -> list[Any]:
        """Names of all classes (entity types) learned, as they were given, in order of arrival."""
        return [self._as_given(name) for names in self.tasks for name in names if name is not None]

    @property
    def memory_(self) -> dict[Any, int]:
        """The number of examples in memory for each class (entity type)."""
        self._taught()
        assert self.method is not None
        kept = Counter(group for memory in self.method.memories() for group in memory.group.tolist())
        groups = enumerate(name for names in self.tasks for name in names)
        return {self._as_given(name): kept[group] for group, name in groups if name is not None}

    @property
    def memory_bytes_(self) -> int:
        """The size of the stored examples and their targets in bytes."""
        return sum(kept.nbytes for kept in (*self._kept.values(), self._kept_targets))

    def fit(self, x: Any, y: Sequence[Any] | None = None) -> Self:
        """Forget everything, then `partial_fit`. If this fails, the learner does not change, so what it has learned is
        in memory until the end."""
        vars(self).update(vars(type(self)(**self._given).partial_fit(x, y)))
        return self

    def partial_fit(self, x: Any, y: Sequence[Any] | None = None) -> Self:
        """Learn the classes in `y` from the examples `x`. If this fails, the learner does not change. Classes may be
        new or, if the method can learn more examples of them (`takes_known`), known.

        Training settings that you leave unset are chosen from these data (experiments/choose.py). `history_` records
        the chosen settings and how much was learned. If little was learned, a warning says so.

        Args:
            x: pictures (uint8 array or tensor, PIL images, paths), texts (strings), or sentences (lists of words).
                Pictures are resized to the size of the first call's, but arrays of another shape are refused.
                Without `y`, data that have labels: a folder or a file (as `bace run` reads them), a `datasets.Dataset`,
                a DataFrame, a list of dicts.
            y: a label for each example; for sentences, a list of IOB2 tags for each.
        """
        y = None if y is None else as_labels(y)  # once: it may be a generator
        table = self._table(x, y)
        known, (numbers, guessed) = self._check_new(table), self._whole_numbers(table)
        told = self._choose_method(table)
        config = self._configured(table.modality.name, self._views)
        _check_settings(config)
        tasks: list[list[str | None]] = [*self.tasks, [name for name in table.names if name not in known]]
        encoder = self.method.model.encoder if self.method else load_backbone(config)
        packed = self._packed if self.method else pack(encoder, config.backbone.name)
        stream = self._stream(table, tasks, config, encoder)
        views = self._views if self.method else self._choose_views(stream, encoder)
        before = None if self.method is None else {k: _copied(v) for k, v in self.method.state_dict().items()}
        try:
            method = self._method_on(stream, config, encoder)
            check_memory(method)
            check_resources(method, [len(self.tasks)])
            chosen, record = self._choose_training(method, stream, config)
            config = self._configured(table.modality.name, views | chosen)
            method.training_settings = config.train
            with bar("learning") as show:
                trainer = Trainer(method, stream, config, show=show or quiet)
                trainer.learn(stream[-1])
            method.task_features.clear()  # the examples get other numbers in the next call
            stock = take_stock(method, stream)
        except BaseException:  # also when interrupted: a task that is half learned is useless
            if before is not None:
                self.method = None
                self._restore(before)
            raise
        if not trainer.optimised:  # the chosen training settings were not used
            chosen, record = {}, {"steps": 0, "rates": {}}
        strings = bool(self._numbers) and not numbers
        self.config, self.modality, self.tasks, self.method = config, table.modality.name, tasks, method
        self._views, self._chosen, self._packed = views, views | chosen, packed
        self.picture, self._numbers, self._guessed = table.modality.picture(stream.data), numbers, guessed
        learned = {"classes": table.names, "known": known, "examples": len(table), "settings": views | chosen}
        learned |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "counts": table.counts()}
        self.history_.append({**learned, **told, **record, **stock})
        self._temperature = self.history_[-1].get("temperature", 1.0)
        self._keep(stream)
        return_freed_memory()
        if strings:
            self._warn_of_strings(table.names)
        tell(self.history_[-1], method)
        return self

    def forget(self, name: Any) -> Self:
        """Remove a class (an entity type): its head rows, its statistics, every stored example that shows it, and its
        entries in `history_`. The class is never predicted again, and may be learned again as a new class. Save the
        learner to remove the class from its folder, too.

        The encoder keeps what its weights have learned from the class. Methods whose statistics mix the classes cannot
        remove one and refuse (docs/learner.md)."""
        modality, gone = self._taught(), str(name)
        assert self.method is not None
        if not self._complete:
            raise ConfigError("a model loaded from a run can only predict: run it again without the class")
        if all(gone not in names for names in self.tasks):
            raise DataError(f"there is no class '{gone}' to forget.{closest_name(gone, map(str, self.classes_))}")
        if len(self.classes_) == 1:
            raise ConfigError(f"'{gone}' is the only class: delete the model instead")
        if why := self.method.cannot_forget:
            raise ConfigError(
                f"{self.method.title} cannot forget a class: {why}. Teach a new learner without '{gone}'; SimpleCIL, "
                "FeCAM and SLDA with `forgettable`, and methods with a memory, can forget"
            )
        changed = copy.deepcopy(self)  # if this fails, the learner does not change
        changed._without(modality, gone)
        vars(self).update(vars(changed))
        return self

    def _without(self, modality: Modality, gone: str) -> None:
        """Remove a class from everything that is stored."""
        assert self.method is not None
        stream = self._kept_stream()
        classes = [c for c in stream.known if gone in modality.own_names([stream.names[c]])]
        rows = torch.nonzero(torch.isin(self._kept_targets, torch.tensor(classes))).flatten()
        shown = torch.unique(stream.owners(rows))
        self.method.forget(classes, shown)
        everything = torch.arange(len(stream.data))
        self._take(stream, everything[~torch.isin(everything, shown)])
        self.tasks = [[None if own == gone else own for own in names] for names in self.tasks]
        self._numbers.discard(gone)
        self.history_ = without_class(self.history_, gone)
        state, self.method = self.method.state_dict(), None
        self._restore(state)  # a new object, without anything that the method has cached

    def predict(self, x: Any, reject: float | None = None) -> list[Any]:
        """Predict the class of each example, under the name that you gave. Sentences that are lists of words get a tag
        for each word; sentences that are strings get their `entities`.

        Args:
            reject: for pictures and texts; an example is "unknown" if its highest probability (`predict_proba`) is
                lower.
        """
        modality, names = self._taught(), self._given_names()
        if reject is None:
            return modality.show(x, self.scores, names)
        self._check_reject(reject)
        tempered = self._tempered(x)  # one pass for both
        labels = modality.show(x, lambda _: tempered, names)
        return [UNKNOWN if low else label for label, low in zip(labels, _below(tempered, reject), strict=True)]

    def predict_proba(self, x: Any) -> np.ndarray:  # (examples, classes)
        """The probability of each class, in the order of `classes_`, calibrated by one temperature."""
        return torch.softmax(self._tempered(x), 1).numpy()

    def decision_function(self, x: Any) -> np.ndarray:  # (examples, classes)
        """`scores` as an array, for data whose examples have one class each."""
        if not self._taught().one_label:
            raise ConfigError("sentences have scores for each word: use `scores`")
        scores = self.scores(x)
        assert isinstance(scores, Tensor)
        return scores.numpy()

    def score(self, x: Any, y: Sequence[Any] | None = None) -> float:
        """The share of examples (for sentences, of words) whose class is predicted correctly. Without `y`, data that
        have labels, as in `partial_fit`."""
        tagged = not self._taught().one_label
        if y is None:
            table = self._table(x, None)
            x, y = table.inputs, table.labels
        x = listed(x) if tagged else x
        if tagged and any(isinstance(sentence, str) for sentence in x):
            raise DataError("each word has a tag: to score sentences, give them as lists of words, not as strings")
        predicted, wanted = self.predict(x), as_labels(y)
        if tagged:
            predicted, wanted = ([tag for tags in all_tags for tag in tags] for all_tags in (predicted, wanted))
        if len(predicted) != len(wanted):
            raise DataError(f"there are {len(predicted)} examples (for sentences, words), but {len(wanted)} labels")
        pairs = [str(one) == str(other) for one, other in zip(predicted, wanted, strict=True)]
        return sum(pairs) / len(pairs)

    def describe(self, x: Sequence[Any], reject: float | None = None) -> list[dict[str, Any]]:
        """The output of `bace predict` for each example: its class and the probability of the class (`predict_proba`);
        for sentences, which are strings, their words, tags and entities. `reject` as in `predict`."""
        modality, names = self._taught(), self._given_names()
        self._check_reject(reject)
        if not modality.one_label:
            return modality.describe(x, self.scores, names)
        tempered = self._tempered(x)
        rows = zip(modality.describe(x, lambda _: tempered, names), _below(tempered, reject), strict=True)
        return [row | {"class": UNKNOWN} if low else row for row, low in rows]

    def entities(self, x: Sequence[str | Sequence[str]]) -> list[list[Span]]:
        """The entities of each sentence, as (start, end, type, text) with positions in characters.

        Args:
            x: sentences, or longer texts, as strings; or as lists of words, in which case positions refer to the words
                joined by spaces.
        """
        modality = self._taught()
        if not isinstance(modality, Token):
            raise ConfigError(f"this learner was taught {self.modality} data: only one taught tags finds entities")
        return modality.entities(x, self.scores, self._given_names())

    def scores(self, x: Any) -> Tensor | list[Tensor]:
        """A score for each class, in the order of `classes_`; for each sentence, a tensor (words, tags)."""
        modality = self._taught()
        assert self.method is not None
        assert self.config is not None
        _, inputs = as_inputs(x, modality=modality.name, image_size=self.picture)
        table = Table(modality, inputs, [""] * len(inputs), [])
        data, _ = modality.encode([table], data_settings(self.config), self.method.model.encoder)
        everything = torch.arange(len(data))
        rows = len(data) if data.positions is None else len(data.positions)
        asked = Stream(data, torch.zeros(rows, dtype=torch.int64), [], self.method.stream.names)
        asked.device = self.method.stream.device
        self.method.eval()
        if cost := self.method.prediction_cost(len(data)):
            logging.getLogger("bace").info(cost)
        with asked.licence("prediction", everything):
            parts, in_order = asked.bucketed(everything, self.config.train.eval_batch_size)
            found = []
            with bar("predicting") if len(parts) > 1 else nullcontext() as show:
                for part in parts:
                    found.append(self.method.predict(asked.batch(part)).cpu())
                    if show:
                        show(len(found) / len(parts), f"{len(data):,} {modality.plural}")
            scores = in_order(torch.cat(found))
        return modality.by_example(scores[:, self.method.stream.known], inputs)

    # -- the interface of scikit-learn

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The settings that you gave."""
        return dict(self._given)

    def set_params(self, **settings: Any) -> Self:
        """Change settings. The learner forgets what it learned with the earlier settings."""
        self.__init__(**{**self._given, **settings})  # type: ignore[misc]
        return self

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn's tools, such as cross_val_score, ask for."""
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags

        inputs = InputTags(one_d_array=True, two_d_array=False, three_d_array=True, string=True)
        target = TargetTags(required=False)
        return Tags("classifier", target, classifier_tags=ClassifierTags(), input_tags=inputs)

    def __sklearn_is_fitted__(self) -> bool:
        return self.method is not None

    def __repr__(self) -> str:
        given = {name: value for name, value in self._given.items() if name != "method"}
        settings = "".join(f", {name}={value!r}" for name, value in given.items())
        if self.method is None:
            return f"Learner({self._given['method']!r}{settings})"
        taught = f"{len(self.classes_)} classes in {len(self.tasks)} calls"
        return f"<Learner({self._given['method']!r}{settings}): {taught}>"

    def _repr_html_(self) -> str:
        """The learner as HTML, for notebooks."""
        return f"<p><code>{escape(repr(self))}</code></p>{as_table(self.history_)}"

    # -- saving

    def save(self, folder: str | Path) -> None:
        """Save everything that is needed to predict and to continue learning, without the data."""
        if self.method is None or self.modality is None:
            raise ConfigError("this learner has learned nothing yet: there is nothing to save")
        if checkpoint.is_foreign(Path(folder)):
            raise ConfigError(f"'{folder}' is not empty and holds no saved learner: choose a new folder")
        tensors, plain = checkpoint.take_state(self.method)
        kept = {f"kept.{name}": value for name, value in self._kept.items()} | {"kept_targets": self._kept_targets}
        saved = Saved(
            given=self._given,
            tasks=self.tasks,
            modality=self.modality,
            picture=self.picture,
            numbers=sorted(self._numbers),
            guessed=self._guessed,
            method=plain,
            train=[ids.tolist() for ids in self._train],
            complete=self._complete,
            chosen=self._chosen,
            auto=self._auto,
            history=self.history_,
            temperature=self._temperature,
            encoder=self._packed,
        )
        checkpoint.save(Path(folder), tensors | kept, {"format": FORMAT, **asdict(saved)}, keep=1)
        write_cards(
            Path(folder),
            self.method.title,
            self.modality,
            [str(name) for name in self.classes_],
            [str(name) for name in self._given_names()],
            {**self._settings(), **self._chosen},
            self.history_,
            self._packed,
        )

    def _save_pretrained(self, save_directory: Path) -> None:
        """For ModelHubMixin: `save_pretrained` and `push_to_hub` write the files that `save` writes."""
        self.save(save_directory)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        trust: bool = False,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
    ) -> Self:
        """A saved learner from a folder or from the hub; `trust` as in `load`. This replaces ModelHubMixin's function,
        which passes on settings from config.json: a stranger's file must not decide for the user."""
        folder = Path(pretrained_model_name_or_path)
        if not folder.is_dir():
            if str(folder).count("/") != 1:
                raise CheckpointError(f"there is no folder '{folder}'; a model of the hub has the form owner/name")
            found = snapshot_download(
                str(pretrained_model_name_or_path),
                revision=revision,
                cache_dir=cache_dir,
                force_download=force_download,
                local_files_only=local_files_only,
                token=token,
            )
            folder = Path(found)
        return cls.load(folder, trust=trust)

    @classmethod
    def load(cls, folder: str | Path, *, trust: bool = False) -> Self:
        """A saved learner. `trust`: the folder may name a method that is not part of bace, which is then imported."""
        found = checkpoint.load(Path(folder))
        if found is None:
            raise CheckpointError(f"'{folder}' holds no saved learner")
        tensors, state = found
        if "given" not in state:
            raise CheckpointError(f"'{folder}' is not a saved learner; a run folder is opened with bace.load")
        with checkpoint.understood(f"the learner in '{folder}'"):
            check_format(state, FORMAT)
            saved: Saved = typed(state, Saved, "learner")
            learner = cls._opened(saved.given, trust, complete=False)
            learner.modality, learner.tasks = saved.modality, list(map(list, saved.tasks))
            learner.picture, learner._numbers, learner._complete = saved.picture, set(saved.numbers), saved.complete
            learner._guessed = saved.guessed
            learner._chosen, learner.history_ = saved.chosen, list(saved.history)
            learner._temperature = saved.temperature
            learner._auto = saved.auto
            learner._views = {name: value for name, value in saved.chosen.items() if name in VIEWS}
            learner.config = learner._configured(saved.modality, saved.chosen)  # refuses an unknown modality
            learner._kept = {n.removeprefix("kept."): t for n, t in tensors.items() if n.startswith("kept.")}
            learner._kept_targets = tensors["kept_targets"]
            learner._train = [torch.tensor(ids, dtype=torch.int64) for ids in saved.train]
            learner._packed = saved.encoder
            learner._restore(checkpoint.method_state(tensors, saved.method))
            learner._check_kept()
        return learner

    @classmethod
    def from_run(cls, folder: str | Path, *, trust: bool = False, force: bool = False) -> Self:
        """The model of a finished run, for prediction; `trust` as in `load`. `force`: even if run.json was changed."""
        run, state, temperature = read_model(Path(folder), force=force)
        with checkpoint.understood(f"the run in '{folder}'"):
            learner = cls._opened(run.config, trust, complete=True)
            learner.config = config_from(learner._given)
            learner.modality = run.modality
            learner.tasks = [list(MODALITIES[run.modality].own_names(list(task.classes))) for task in run.tasks]
            learner.picture, learner._complete = run.picture, False
            learner._restore(state)
        if temperature is not None:
            learner._temperature = temperature
        elif MODALITIES[run.modality].one_label:
            warnings.warn(
                f"the probabilities of the run in '{folder}' are not calibrated: its metrics.json has no temperature, "
                "because it is older, its method trains without remembering every class, or predicting takes too long. "
                "The classes are not affected",
                stacklevel=3,
            )
        return learner

    # -- inside

    @classmethod
    def _opened(cls, given: dict[str, Any], trust: bool, *, complete: bool) -> Self:
        """An empty learner with settings from a file: all settings (`complete`), or only those that a user gave."""
        given = current(given, complete=complete)
        if not trust:
            config_from(settled(given, CANDIDATES["SimpleCIL"]))  # refuses a method that would have to be imported
        method = {name.removeprefix("method."): value for name, value in given.items() if name.startswith("method.")}
        others = {name: value for name, value in given.items() if not name.startswith("method.")}
        return cls(method if len(method) > 1 else method["name"], **others)

    def _restore(self, state: dict[str, Any]) -> None:
        """Build the method again with its shapes for all tasks, then load its state dict, which includes the
        encoder."""
        assert self.config is not None
        stream = self._kept_stream()
        numbers = sum(value.numel() for value in state.values() if isinstance(value, Tensor))
        encoder = None if self._packed is None else unpack(self._packed, numbers)
        self.method = self._method_on(stream, self.config, encoder)
        self.method.now.end(stream[-1])
        needed = max(self.method.needs(task.index)[0] for task in stream.tasks)
        if needed > LARGER * numbers:  # checked before it is built: the settings may be a stranger's
            raise CheckpointError(f"its settings ask for {needed:,} numbers, but there are {numbers:,} in the file")
        self.method.rebuild(stream.tasks)
        self.method.load_state_dict(state)

    def _tempered(self, x: Any) -> Tensor:  # (examples, classes)
        """Scores whose soft-max gives the probabilities."""
        return finite(torch.from_numpy(self.decision_function(x))) / self._temperature

    def _check_reject(self, reject: float | None) -> None:
        if reject is None:
            return
        if not isinstance(reject, int | float) or not 0 <= reject <= 1:
            raise ConfigError(f"reject is {reject!r}: it must be a probability, from 0 to 1")
        if not self._taught().one_label:
            raise ConfigError(
                f"reject is {reject!r}, and this model tags words, which have no probabilities: leave it out. It is "
                "for models of pictures and texts"
            )

    def _check_kept(self) -> None:
        assert self.method is not None
        ids = torch.cat([*self._train, self.method.remembered()])
        if not ((ids >= 0) & (ids < len(self.method.stream.data))).all():
            raise ValueError("it remembers examples that it does not hold")

    def _taught(self) -> Modality:
        if self.method is None or self.modality is None:
            raise ConfigError("this learner has learned nothing yet: call partial_fit first")
        return MODALITIES[self.modality]

    def _configured(self, modality: str, chosen: dict[str, Any]) -> Config:
        """The given settings, then the chosen ones, then the defaults for a user's own data of the modality."""
        if self.modality is not None and self.modality != modality:
            taught, given = MODALITIES[self.modality].plural, MODALITIES[modality].plural
            raise DataError(f"this learner knows {taught}, and these are {given}: give it {taught}, or teach a new one")
        own_data = MODALITIES[modality].own_data
        return config_from({"benchmark.name": own_data, **chosen, **self._settings()})

    def _settings(self) -> dict[str, Any]:
        """The given settings, with a method in place of "auto"; before the first call, an arbitrary one."""
        return settled(self._given, self._auto or CANDIDATES["SimpleCIL"])

    def _choose_method(self, table: Table) -> dict[str, Any]:
        """Choose the method at the first call, if it is "auto", and return its entry in `history_`."""
        if self.method is not None or flatten(self._given)["method.name"] != AUTO:
            return {}
        self._auto, why = choose_method(table.modality.name, len(table) / len(table.names))
        logging.getLogger("bace").info(f"the method is {why}")
        return {"method": why}

    def _choose_views(self, stream: Stream, encoder: Encoder) -> dict[str, Any]:
        if not self._unset.issuperset(VIEWS) or (found := choose.choose_views(stream, encoder)) is None:
            return {}
        return dict(zip(VIEWS, found, strict=True))

    def _choose_training(self, method: Method, stream: Stream, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
        """Values for the unset training settings that suit the new data, and their entries in `history_`."""
        train, count, unset = config.train, len(stream[-1].train), self._unset
        if "train.batch_size" in unset:
            train = replace(train, batch_size=choose.choose_batch_size(count, train.batch_size))
        steps = choose.steps_of_epoch(method, train.batch_size, count)
        if "train.epochs" in unset:
            train = replace(train, epochs=choose.choose_epochs(steps, train.epochs))
        rates = choose.search_rate(method, stream, replace(config, train=train)) if "train.lr" in unset else {}
        if rates:
            train = replace(train, lr=choose.best_rate(rates))
        names = [name for name in ("batch_size", "epochs", "lr") if getattr(train, name) != getattr(config.train, name)]
        return {f"train.{name}": getattr(train, name) for name in names}, {
            "steps": steps * train.epochs,
            "rates": {f"{rate:g}": round(worth, 4) for rate, worth in rates.items()},
        }

    @property
    def _unset(self) -> set[str]:
        return CHOSEN - set(self._settings())

    def _method_on(self, stream: Stream, config: Config, encoder: Encoder | None = None) -> Method:
        """The method so far with its new stream; it is built at the first call."""
        if self.method is None:
            # nothing is cached: deleted texts must be gone, and examples are read only once for a prediction
            return method_on(stream, replace(config, backbone=replace(config.backbone, cache=0)), encoder)
        stream.device = self.method.stream.device
        self.method.stream = stream
        return self.method

    def _table(self, x: Any, y: Sequence[Any] | None) -> Table:
        options: PictureOptions = {"image_size": None if isinstance(x, Tensor | np.ndarray) else self.picture}
        if isinstance(x, Table):  # of `bace learn`
            return x.present()
        if y is not None:
            return from_arrays(x, y, encoder=self._reads, **options)
        given = flatten(self._given)
        inputs, label = given.get("benchmark.input_column"), given.get("benchmark.label_column")
        reading = read if isinstance(x, str | Path) else from_records
        table = reading(x, modality=self.modality, input_column=inputs, label_column=label, **options)
        return table.present()  # a part of a set may name all classes of the set, which later calls bring

    def _reads(self) -> str | None:
        """What the encoder reads: "image", "text", or None if it is the default for the first call's data."""
        name = self._settings().get("backbone.name")
        if self.method is not None:
            return self.method.model.encoder.modality
        if name in OWN:
            return str(OWN[name]().modality)
        return None if name is None else encoder_modality(name)

    def _check_new(self, table: Table) -> list[str]:
        """The known classes of a call, if the learner can learn more examples of them."""
        if not self._complete:
            raise ConfigError("a model loaded from a run can only predict: its memory's examples are in the benchmark")
        if not table.names:  # only sentences can show none
            raise DataError(f"all words of these {table.modality.plural} are tagged O: give some with entities.")
        if nul := [name for name in table.names if "\0" in name]:  # marks the names of forgotten classes (`_all_named`)
            raise DataError(f"class {nul[0]!r} has the character NUL in its name: give it another name.")
        known = [name for name in table.names if any(name in names for names in self.tasks)]
        if known and self.method is not None and not self.method.takes_known:
            can = ", ".join(sorted(method.title for method in methods.METHODS if method.takes_known))
            raise DataError(
                f"class '{known[0]}' was learned before, and {self.method.title} with these settings cannot learn more "
                f"of known classes: give it new classes only, or take one of {can}"
            )
        if isinstance(table.inputs, Tensor) and self.picture not in (None, tuple(table.inputs.shape[2:])):
            raise DataError(
                f"these pictures have {tuple(table.inputs.shape[2:])} pixels, but the learned ones have "
                f"{self.picture}: resize them alike"
            )
        return known

    def _whole_numbers(self, table: Table) -> tuple[set[str], bool]:
        """The names that are returned as whole numbers: all, if the labels of the first call were whole numbers, or
        none. They can therefore be sorted and compared, even if a later call mixes numbers with strings or folders.
        And whether this is a guess, because the labels came from a CSV file: then another label makes all strings."""
        known = {name for names in self.tasks for name in names if name is not None}
        numbers, guessed = table.given != "strings", table.given == "digits"
        if known:
            numbers, guessed = self._numbers >= known, self._guessed and table.given != "numbers"
        if not numbers:
            return set(), False
        strange = [name for name in table.names if not is_whole(name)]
        if strange and guessed:
            return set(), False
        if strange:
            raise DataError(
                f"class '{strange[0]}' is no whole number, and the classes of this learner are "
                f"({some(self.classes_)}): give it a number, or teach a new learner with strings as labels"
            )
        return self._numbers | set(table.names), guessed

    def _warn_of_strings(self, names: Sequence[str]) -> None:
        strange = next(name for name in names if not is_whole(name))
        before = [name for earlier in self.tasks[:-1] for name in earlier if name is not None]
        warnings.warn(
            f"class '{strange}' is no whole number, and the classes so far ({some(before)}) were read from a CSV file: "
            "from now on, all labels of this learner are strings",
            stacklevel=3,
        )

    def _stream(self, table: Table, tasks: list[list[str | None]], config: Config, encoder: Encoder) -> Stream:
        """Stored examples first, then new ones; only the new task has a training set (joint methods store all)."""
        modality = table.modality
        modality.check_encoder(encoder, config.backbone.name)
        data, (count,) = modality.encode([table], data_settings(config), encoder)
        first = 0
        if self._kept:
            before = len(data)
            data.prepend(self._kept)
            first = len(data) - before
        names, forgotten = _names(tasks, modality)
        number = {name: c for c, name in enumerate(names)}
        targets = torch.cat([self._kept_targets, modality.targets(table.labels, table.names, number)])
        train = [*(self._train or [NO_IDS] * (len(tasks) - 1)), torch.arange(first, first + count)]
        return Stream(data, targets, _tasks(tasks, modality, train), names, forgotten=forgotten)

    def _keep(self, stream: Stream) -> None:
        """Keep the examples in memory (all examples, if the method trains jointly) and drop the rest."""
        assert self.method is not None
        joint = self.method.licence == "past"
        self._train = [task.train if joint else NO_IDS for task in stream]
        self._take(stream, torch.arange(len(stream.data)) if joint else torch.unique(self.method.remembered()))
        assert self.config is not None
        self.method = self._method_on(self._kept_stream(), self.config)

    def _take(self, stream: Stream, ids: Tensor) -> None:
        """Keep only these examples, under new ids."""
        assert self.method is not None
        rows, _ = stream.rows_of(ids)
        self._kept, self._kept_targets = stream.data.take(ids), stream.targets[rows]
        new_id = torch.full((len(stream.data),), -1)
        new_id[ids] = torch.arange(len(ids))
        for memory in self.method.memories():
            memory.examples = new_id[memory.examples]
        self._train = [new_id[train[torch.isin(train, ids)]] for train in self._train]

    def _kept_stream(self) -> Stream:
        """The tasks so far, over the stored examples. The stream is closed: the examples are read only after the next
        call has put them before its own."""
        assert self.modality is not None
        modality = MODALITIES[self.modality]
        names, forgotten = _names(self.tasks, modality)
        tasks = _tasks(self.tasks, modality, self._train or [NO_IDS] * len(self.tasks))
        return Stream(modality.restore(self._kept), self._kept_targets, tasks, names, forgotten=forgotten)

    def _as_given(self, name: str) -> Any:
        return int(name) if name in self._numbers else name

    def _given_names(self) -> list[Any]:
        """The names of the columns of `scores`."""
        assert self.method is not None
        return [self._as_given(self.method.stream.names[c]) for c in self.method.stream.known]


def _check_settings(config: Config) -> None:
    """Refuse settings that only a run can have."""
    if config.train.early_stop or not config.train.reset_optimiser:
        raise ConfigError(
            "a Learner has no validation data and makes a new optimiser at each call: leave out train.early_stop "
            "and train.reset_optimiser"
        )
    if not config.train.epochs:
        raise ConfigError("train.epochs is 0: the method would train nothing. Give at least 1, or leave it out")
    if config.studies:
        raise ConfigError("a Learner has no test data and observes nothing: leave out studies")
    if config.log:
        raise ConfigError("a Learner logs to logging.getLogger('bace') and to its history_: leave out log")


def _below(tempered: Tensor, reject: float | None) -> list[bool]:  # (examples, classes)
    """For each example, whether its highest probability is below `reject`."""
    return [reject is not None and share < reject for share in torch.softmax(tempered, 1).amax(1).tolist()]


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _tasks(names: Sequence[Sequence[str | None]], modality: Modality, train: list[Tensor]) -> list[Task]:
    ranges = modality.class_ranges(_all_named(names))
    return [Task(t, f"task {t + 1}", ranges[t], train[t], NO_IDS, NO_IDS) for t in range(len(names))]


def _all_named(tasks: Sequence[Sequence[str | None]]) -> list[list[str]]:
    """Class names by task; forgotten classes get a name that no user gives."""
    return [[f"\0{t} {i}" if name is None else name for i, name in enumerate(names)] for t, names in enumerate(tasks)]


def _names(tasks: Sequence[Sequence[str | None]], modality: Modality) -> tuple[list[str], tuple[int, ...]]:
    """The names of all class ids, and the ids of the forgotten classes."""
    names = modality.class_names(_all_named(tasks))
    unnamed = [any(own.startswith("\0") for own in modality.own_names([name])) for name in names]
    return names, tuple(c for c, forgotten in enumerate(unnamed) if forgotten)
