"""The numbers of studies are compared with hand-computed ones, scikit-learn and brute force. Studies do not influence
the run, and they resume."""

import base64
import io
import json
import math
from typing import Any, get_args

import checks
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import bace
from bace.cli.main import main
from bace.config.parse import config_from
from bace.config.schema import Config, StudyName
from bace.core import checkpoint
from bace.core.study import Skipped
from bace.core.trainer import Trainer
from bace.data.modalities.image import thumbnail
from bace.errors import ConfigError, StreamRefused
from bace.experiments.assemble import assemble
from bace.experiments.run import Result
from bace.methods import METHODS
from bace.models.heads import CosineHead, LinearHead
from bace.randomness import generator
from bace.studies import STUDIES, Observation, Study, gallery, probing, tracking

ALL = ["probing", "tracking", "gallery", "bias"]


def study(tiny: Any, method: Any, modality: str = "image", studies: list[str] = ALL, **changes: Any) -> Result:
    return bace.run(tiny.settings(modality, method=method, studies=studies, **changes))


def chosen(config: Config) -> dict[str, Study]:
    return {name: STUDIES[name] for name in config.studies}


def learned(tiny: Any, method: Any, modality: str = "image", **changes: Any) -> Observation:
    """A method that has just learned its last task, before the evaluation."""
    config = config_from(tiny.settings(modality, method=method, **changes))
    trainer = Trainer(*assemble(config), config, studies=chosen(config))
    trainer.run()
    return Observation(trainer.method, trainer.stream[-1], trainer.results.matrix[-1])


@pytest.fixture
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which it does not matter whether the classifiers of probing have converged."""
    assert probing.fit_probe.__kwdefaults__ is not None
    monkeypatch.setitem(probing.fit_probe.__kwdefaults__, "least_steps", 20)


# -- the contract


def test_every_study_that_a_setting_names_exists():
    assert set(get_args(StudyName)) == set(STUDIES) == set(ALL)


@pytest.mark.usefixtures("short_probes")
@pytest.mark.parametrize(("method", "modality"), [("BaCE", "image"), ("ER", "text"), ("SEQ", "token")])
def test_a_run_with_studies_has_the_weights_and_scores_of_one_without(tiny, tmp_path, method, modality):
    for name, studies in (("without", []), ("with", ALL)):
        bace.run(tiny.settings(modality, method=method, studies=studies), out=tmp_path / name)
    without, with_studies = (checks.final_state(tmp_path / name) for name in ("without", "with"))
    licences = [state[1][0].pop("licences") for state in (without, with_studies)]
    checks.assert_same(without, with_studies)
    more = set(licences[1]) - set(licences[0])
    assert {reason.split()[0] for reason in more} == {"probing", "tracking", "gallery"}
    assert not (tmp_path / "without" / "studies.json").exists()
    assert set(json.loads((tmp_path / "with" / "studies.json").read_text())) == set(ALL)


@pytest.mark.usefixtures("short_probes")
@pytest.mark.parametrize(
    ("method", "points"),
    [
        ("BaCE", [("step", 13), ("finish", 2), ("evaluate", 3), ("task", 3)]),
        ({"name": "BiC", "bias_epochs": 3}, [("evaluate", 2)]),
    ],
)
def test_a_killed_and_resumed_run_finds_the_same(tiny, tmp_path, monkeypatch, method, points):
    settings = tiny.settings("image", method=method, studies=ALL)
    with monkeypatch.context() as patch:
        patch.setattr("bace.experiments.run.Trainer", checks.copying_at(points, tmp_path))
        bace.run(settings, out=tmp_path / "copied")
    expected = (tmp_path / "copied" / "studies.json").read_bytes()
    for kind, count in points:
        folder = tmp_path / f"{kind}-{count}"
        assert not (folder / "studies.json").exists()
        bace.run(resume=folder)
        assert (folder / "studies.json").read_bytes() == expected
        checks.assert_same(checks.final_state(folder), checks.final_state(tmp_path / "copied"))


@pytest.mark.usefixtures("short_probes")
def test_records_are_plain_json_in_the_checkpoint_and_without_pictures(tiny, tmp_path):
    bace.run(tiny.settings("image", method="SEQ", studies=ALL), out=tmp_path / "run")
    found = checkpoint.load(tmp_path / "run" / "checkpoints")
    assert found is not None
    records = found[1]["results"]["studies"]
    assert {name: len(of_task) for name, of_task in records.items()} == dict.fromkeys(ALL, 3)
    assert "image" not in json.dumps(records)


def test_past_and_test_data_are_open_to_a_study_only_while_it_looks(tiny):
    seen = learned(tiny, "SEQ")
    stream, past = seen.stream, seen.stream[0].train[:1]
    for name in ("probing", "tracking", "gallery"):
        STUDIES[name].observe(seen)
        assert any(reason.startswith(f"{name} (a study") for reason in stream.licences)
        with pytest.raises(StreamRefused):
            stream.batch(past)
        with pytest.raises(StreamRefused):
            stream.batch(seen.task.test[:1])


def test_the_time_of_studies_is_not_counted_as_the_method_s(tiny, monkeypatch):
    config = config_from(tiny.settings("image", method="SEQ", studies=["tracking"]))
    trainer = Trainer(*assemble(config), config, studies=chosen(config))
    ticks = iter([(1000.0, 20.0), (1500.0, 90.0)])  # seconds and passes before and after the studies
    monkeypatch.setattr(trainer, "spent", lambda: next(ticks))
    trainer.clock = (10.0, 5.0)
    monkeypatch.setattr(trainer, "studies", {})
    trainer.observe(trainer.stream[0], [100.0])
    assert (trainer.results.seconds, trainer.results.passes) == (990.0, 15.0)
    assert trainer.clock == (1500.0, 90.0)


# -- settings


def test_studies_are_named_one_after_the_other_on_the_command_line(capsys):
    for words, expected in (
        (["--studies", "probing", "tracking", "--seed", "3"], ["probing", "tracking"]),
        (["--seed", "3", "--studies", "gallery"], ["gallery"]),
        (["--studies=[probing,bias]"], ["probing", "bias"]),
    ):
        capsys.readouterr()
        assert main(["run", *words, "--print_config"]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["studies"] == expected
    assert config_from({"studies": ["tracking"]}).studies == ["tracking"]
    assert config_from({}).studies == []


def test_a_study_that_does_not_exist_is_refused_before_anything_is_loaded(capsys):
    assert main(["run", "--studies", "probing", "trakking"]) == 2
    message = capsys.readouterr().err
    assert "--studies is 'trakking'" in message
    assert "Did you mean 'tracking'?" in message


def test_a_learner_refuses_studies(tiny):
    learner = bace.Learner("seq", studies=["probing"])
    with pytest.raises(ConfigError, match="leave out studies"):
        learner.partial_fit(*checks.training_examples(tiny, "image", (0, 1)))


# -- probing


def overlapping_classes(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Four Gaussian classes in eight dimensions. About one row in five is on the wrong side, so the best linear
    classifier is not at infinity."""
    rng = generator(seed, "classes")
    targets = torch.randint(4, (rows,), generator=rng)
    centres = 1.5 * torch.randn(4, 8, generator=generator(0, "centres"))
    return centres[targets] + 2 * torch.randn(rows, 8, generator=rng), targets


def test_the_linear_probe_agrees_with_logistic_regression_on_the_same_features():
    (features, targets), (asked, truth) = overlapping_classes(2000, 1), overlapping_classes(2000, 2)
    head = LinearHead(8)
    head.grow(4, generator(0, "rows"))
    probing.fit_probe(head, features, targets, generator(0, "order"), epochs=400, batch_size=2000, lr=0.05)
    oracle = LogisticRegression(C=1e6, max_iter=1000, tol=1e-8).fit(features.numpy(), targets.numpy())
    with torch.no_grad():
        logits = head(asked)
    assert F.softmax(logits, 1).numpy() == pytest.approx(oracle.predict_proba(asked.numpy()), abs=0.005)
    agree = float((logits.argmax(1).numpy() == oracle.predict(asked.numpy())).mean())
    assert agree > 0.998
    accuracy = float((logits.argmax(1) == truth).double().mean())
    assert accuracy == pytest.approx(oracle.score(asked.numpy(), truth.numpy()), abs=0.001)
    assert 0.7 < accuracy < 0.95  # not so easy that they could not differ


@pytest.mark.parametrize("make", [CosineHead, LinearHead])
def test_the_recipe_of_the_study_comes_close_to_logistic_regression(make):
    """The rows are the pixels of handwritten digits."""
    features, targets = load_digits(return_X_y=True)
    features, targets = torch.tensor(features, dtype=torch.float32), torch.tensor(targets)
    head = make(64)
    head.grow(10, generator(0, "rows"))
    probing.fit_probe(head, features[:1200], targets[:1200], generator(0, "order"))
    oracle = LogisticRegression(max_iter=1000).fit(features[:1200].numpy(), targets[:1200].numpy())
    with torch.no_grad():
        accuracy = float((head(features[1200:]).argmax(1) == targets[1200:]).double().mean())
    assert accuracy == pytest.approx(oracle.score(features[1200:].numpy(), targets[1200:].numpy()), abs=0.03)


def test_the_probe_takes_epochs_on_a_large_set_and_steps_on_a_small_one():
    for rows, expected in ((3000, 480), (2500, 400), (256, 400), (1, 400)):
        head = LinearHead(2)
        head.grow(2, generator(0))
        passes = []
        head.register_forward_hook(lambda *_, passes=passes: passes.append(1))
        probing.fit_probe(head, torch.zeros(rows, 2), torch.zeros(rows, dtype=torch.int64), generator(0))
        assert len(passes) == expected


def test_probing_reads_features_that_the_method_s_own_classifier_has_forgotten(tiny):
    """The head rows of old classes are spoiled; the features do not change."""
    seen = learned(tiny, "MTL", **{"train.epochs": 12})
    before = probing.after_task(seen)
    with torch.no_grad():
        for block in list(seen.method.model.head.blocks)[:-1]:
            block.neg_()
    assert probing.after_task(Observation(seen.method, seen.task, [0.0, 0.0, 100.0])) == {**before, "observed": 100 / 3}
    assert before["observed"] == pytest.approx(np.mean(seen.scores))


def test_probing_and_tracking_do_not_see_a_bias_correction(tiny):
    seen = learned(tiny, {"name": "BaCE", "bias_correction": True})
    before = [s.observe(seen) for s in (STUDIES["probing"], STUDIES["tracking"])]
    seen.method.bias.copy_(torch.tensor([0.1, 5.0, 3.0]))
    fresh = Observation(seen.method, seen.task, seen.scores)
    assert [s.observe(fresh) for s in (STUDIES["probing"], STUDIES["tracking"])] == before


def test_probing_of_entities_is_macro_f1_over_all_tasks_so_far(tiny):
    found = study(tiny, "MTL", "token", ["probing"], **{"train.optimiser": "adamw", "train.epochs": 8})
    numbers = found.studies["probing"]
    assert numbers["observed"] == pytest.approx(found.metrics["A"])
    for name in ("cosine", "linear"):
        assert len(numbers[name]) == 3
        assert all(0 <= value <= 100 for value in numbers[name])
    assert max(numbers["cosine"]) > 20


# -- tracking


def test_distances_by_hand():
    """Class 0 has features (1, 0) and (0, 2), whose unit mean points to (1, 1), and the head row (3, 0): 1 - cos 45.
    Class 1 has (0, 5) and the head row (0, -1): 2. Class 2 has no rows."""
    features = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 5.0]])
    rows = torch.tensor([[3.0, 0.0], [0.0, -1.0], [1.0, 1.0]])
    found = tracking.class_distances(features, torch.tensor([0, 0, 1]), rows)
    assert found[:2].tolist() == pytest.approx([1 - math.sqrt(0.5), 2.0])
    assert found[2].isnan()


def test_tracking_after_the_last_task_by_numpy(tiny):
    seen = learned(tiny, "ER")
    found = tracking.collect([tracking.after_task(seen)], seen.stream, None)  # type: ignore[arg-type]
    with seen.licence("test"):
        features, targets = (t.numpy().astype(np.float64) for t in seen.training)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    rows = seen.method.model.head.weight.detach().numpy().astype(np.float64)
    distance = []
    for c in range(5):
        mu = unit[targets == c].mean(0)
        distance.append(1 - mu @ rows[c] / np.linalg.norm(mu) / np.linalg.norm(rows[c]))
    assert found["distance"][0] == pytest.approx([np.mean(distance[:2]), distance[2], np.mean(distance[3:])])
    euclidean = np.sqrt(2 * np.array(distance))
    assert found["euclidean"][0] == pytest.approx([np.mean(euclidean[:2]), euclidean[2], np.mean(euclidean[3:])])
    old, new = np.mean(distance[:3]), np.mean(distance[3:])
    assert [*found["old"], *found["new"], *found["all"]] == pytest.approx([old, new, np.mean(distance)])
    assert found["difference"] == pytest.approx(old - new)


def test_tracking_has_a_lower_triangle_and_no_old_classes_at_first(tiny):
    found = study(tiny, "SEQ", studies=["tracking"]).studies["tracking"]
    assert [len(row) for row in found["distance"]] == [1, 2, 3]
    assert [len(row) for row in found["euclidean"]] == [1, 2, 3]
    assert found["old"][0] is None
    assert found["new"] == pytest.approx([row[-1] for row in found["distance"]])
    assert found["difference"] == pytest.approx(found["old"][-1] - found["new"][-1])


def test_tracking_of_entities_leaves_the_background_out(tiny):
    seen = learned(tiny, "SEQ", "token")
    found = tracking.after_task(seen)
    with seen.licence("test"):
        every = tracking.class_distances(*seen.training, seen.method.model.head.weight.detach())
    first = seen.stream[0].classes
    assert found["distance"][0] == pytest.approx(float(every[1 : first.stop].nanmean()))
    assert found["all"] == pytest.approx(float(every[1:].nanmean()))


# -- the gallery


@pytest.mark.usefixtures("double")
def test_the_gallery_shows_the_neighbours_of_bace_s_last_table(tiny):
    """The oracle is brute force over the teacher's features of the last epoch's view, when the table is made."""
    config = config_from(tiny.settings("image", method="BaCE", studies=["gallery"]))
    method, stream = assemble(config)
    expected: dict[int, dict[int, list[tuple[int, float]]]] = {}
    original = method.before_epoch

    def spying(stage: Any) -> None:
        original(stage)
        if method.teacher is None:
            return
        ids = stream[method.now.task].train
        features = F.normalize(method.outputs(ids, method.teacher, view=method.now.view()).features.double(), dim=1)
        away = torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist")
        away.fill_diagonal_(math.inf)
        order = away.argsort(stable=True)[:, :5]
        expected[method.now.task] = {
            int(i): [(int(ids[j]), float(away[row, j])) for j in order[row]] for row, i in enumerate(ids)
        }

    method.before_epoch = spying  # type: ignore[method-assign]
    trainer = Trainer(method, stream, config, studies=chosen(config))
    trainer.run()
    found = trainer.findings()["gallery"]["tasks"]
    assert [task["from"] for task in found] == ["network", "epoch table", "epoch table"]
    for task in (1, 2):
        assert len(found[task]["anchors"]) == gallery.ANCHORS
        for anchor in found[task]["anchors"]:
            near = [(n["example"], n["distance"]) for n in anchor["neighbours"]]
            wanted = expected[task][anchor["example"]]
            assert [example for example, _ in near] == [example for example, _ in wanted]
            assert [d for _, d in near] == pytest.approx([d for _, d in wanted], abs=1e-5)


def test_the_gallery_of_a_method_without_neighbours_shows_the_nearest_of_the_task(tiny):
    seen = learned(tiny, "LwF")
    found = gallery.collect([*[{"from": "", "anchors": []}] * 2, gallery.after_task(seen)], seen.stream, None)["tasks"][
        2
    ]  # type: ignore[arg-type]
    assert found["from"] == "teacher"
    ids = seen.task.train
    features = F.normalize(seen.method.outputs(ids, seen.method.teacher).features.double(), dim=1)
    place = {int(i): row for row, i in enumerate(ids)}
    classes = {anchor["label"] for anchor in found["anchors"]}
    assert len(classes) == 2  # both classes of the task
    for anchor in found["anchors"]:
        own = place[anchor["example"]]
        away = (features - features[own]).norm(dim=1)
        away[own] = math.inf
        nearest = away.sort().values[:5].tolist()
        assert [n["distance"] for n in anchor["neighbours"]] == pytest.approx(nearest, abs=1e-5)
        for n in anchor["neighbours"]:
            assert n["distance"] == pytest.approx(float(away[place[n["example"]]]), abs=1e-5)
            assert n["same"] == (n["label"] == anchor["label"])


def test_the_gallery_s_pictures_are_those_of_the_examples(tiny):
    config = config_from(tiny.settings("image", method="SEQ", studies=["gallery"]))
    trainer = Trainer(*assemble(config), config, studies=chosen(config))
    trainer.run()
    pixels = trainer.stream.data.pixels  # type: ignore[attr-defined]
    for task in trainer.findings()["gallery"]["tasks"]:
        for anchor in task["anchors"]:
            for shown in (anchor, *anchor["neighbours"]):
                picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(shown["image"]))))
                assert np.array_equal(picture, pixels[shown["example"]].expand(3, -1, -1).permute(1, 2, 0).numpy())


def test_a_large_picture_becomes_a_small_one_of_its_shape():
    picture = Image.open(io.BytesIO(base64.b64decode(thumbnail(torch.zeros(3, 256, 128, dtype=torch.uint8)))))
    assert picture.size == (32, 64)


def test_the_gallery_shows_texts(tiny):
    found = study(tiny, "ER", "text", ["gallery"]).studies["gallery"]["tasks"]
    lines = (tiny.folder / "texts" / "train.csv").read_text()
    for task in found:
        for anchor in task["anchors"]:
            assert anchor["text"].split()[0] in lines
            assert len(anchor["neighbours"]) == 5
            assert "[CLS]" not in anchor["text"]


def test_the_gallery_shows_a_word_in_its_sentence_and_never_the_background(tiny):
    found = study(tiny, "BaCE", "token", ["gallery"]).studies["gallery"]["tasks"]
    assert [task["from"] for task in found] == ["network", "epoch table", "epoch table"]
    sentences = [
        {tuple(line.split()) for line in block.splitlines()}
        for block in (tiny.folder / "sentences" / "train.conll").read_text().strip().split("\n\n")
    ]
    for task in found:
        for anchor in task["anchors"]:
            for shown in (anchor, *anchor["neighbours"]):
                assert shown["label"] != "O"
                begin, end = shown["word"]
                word = shown["text"][begin:end].replace(" ##", "")  # the tiny tokenizer puts no pieces together
                assert " " not in word
                assert any((word, shown["label"]) in sentence for sentence in sentences), (word, shown["label"])


def test_anchors_are_of_different_classes_as_long_as_there_are_any():
    targets = torch.tensor([0] * 50 + [1] * 2 + [2])
    for seed in range(20):
        chosen = targets[gallery.choose(targets, generator(seed))]
        assert sorted(chosen.tolist()) == [0, 1, 2]
    assert len(gallery.choose(torch.zeros(2, dtype=torch.int64), generator(0))) == 2


# -- bias, and methods for which a study is not defined


def test_the_learned_bias_is_recorded_after_each_task(tiny):
    result = study(tiny, {"name": "BiC", "bias_epochs": 5}, studies=["bias"])
    pairs = [pair.tolist() for pair in result.method.pairs]  # type: ignore[union-attr]
    assert result.studies["bias"] == {"A": [a for a, _ in pairs], "B": [b for _, b in pairs]}
    assert pairs[0] == [1.0, 0.0]
    assert pairs[2] != [1.0, 0.0]


def test_bace_s_bias_is_learned_after_the_last_task(tiny):
    found = study(tiny, {"name": "BaCE", "bias_correction": True}, studies=["bias"]).studies["bias"]
    assert found["A"][:2] == [1.0, 1.0]
    assert found["B"][:2] == [0.0, 0.0]
    assert (found["A"][2], found["B"][2]) != (1.0, 0.0)


@pytest.mark.usefixtures("short_probes")
@pytest.mark.parametrize(
    ("method", "refused"),
    [("HAT", {"probing", "tracking", "bias"}), ("PODNet", {"tracking", "bias"}), ("GDumb", {"bias"})],
)
def test_a_study_that_does_not_apply_says_why(tiny, method, refused):
    changes = {"method.passes": 2} if method == "GDumb" else {}
    found = study(tiny, method, **changes).studies
    assert {name for name, of in found.items() if "skipped" in of} == refused
    for name in refused:
        assert method in found[name]["skipped"]


@pytest.mark.usefixtures("short_probes")
@pytest.mark.parametrize("method", [method.title for method in METHODS if "image" in method.modalities])
def test_every_method_can_be_studied_or_it_is_said_why_not(tiny, method):
    changes = {"benchmark.tasks": [2, 1], "train.epochs": 1, "measure.fwt": False}
    found = study(tiny, checks.short(method, 1), **changes).studies
    for name, of in found.items():
        if "skipped" in of:
            assert method in of["skipped"], name
    for name, key in (("probing", "cosine"), ("tracking", "new"), ("gallery", "tasks"), ("bias", "A")):
        assert "skipped" in found[name] or len(found[name][key]) == 2


def test_skipping_is_said_once_for_the_whole_run():
    def refuse(seen: Observation) -> dict[str, Any]:
        raise Skipped("not this one")

    made = STUDIES["tracking"].__class__(refuse, lambda *_: {"never": 1})
    record = made.observe(None)  # type: ignore[arg-type]
    assert made.findings([record, record], None, None) == {"skipped": "not this one"}  # type: ignore[arg-type]
