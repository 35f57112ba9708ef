"""scikit-learn's own tests of estimators. Those that make sense for a Learner are run, and the others are listed.

They pass tables of numbers, but a Learner learns from pictures, texts and sentences. The rows of a table are therefore
turned into small pictures here, and nothing else is changed.
"""

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import SGDClassifier
from sklearn.utils import estimator_checks

import bace


class OnTables(bace.Learner):
    """A learner of rows of numbers, which become pictures of 8 x 8 pixels."""

    def _table(self, x: Any, y: Any) -> Any:
        return super()._table(as_pictures(x), np.asarray(y))

    def scores(self, x: Any) -> Any:
        return super().scores(as_pictures(x))

    def predict(self, x: Any, reject: float | None = None) -> Any:
        return np.array(super().predict(x, reject))

    def __sklearn_tags__(self) -> Any:
        return SGDClassifier().__sklearn_tags__()


def as_pictures(x: Any) -> np.ndarray:  # (rows, features) -> (rows, 8, 8)
    numbers = np.asarray(x, dtype=float)
    return (128 + 12 * np.resize(numbers.T, (64, len(numbers))).T).clip(0, 255).astype(np.uint8).reshape(-1, 8, 8)


RUN = (
    "check_dict_unchanged",
    "check_estimator_repr",
    "check_estimators_fit_returns_self",
    "check_estimators_overwrite_params",
    "check_f_contiguous_array_estimator",
    "check_fit_idempotent",
    "check_fit_score_takes_y",
    "check_get_params_invariance",
    "check_methods_sample_order_invariance",
    "check_mixin_order",
    "check_parameters_default_constructible",
    "check_readonly_memmap_input",
    "check_valid_tag_types",
)
_NUMBERS = "about tables of numbers, which a Learner refuses: their shapes, types, missing values and messages"
_WEIGHTS = "about weights of samples or classes, which a Learner does not take"
NOT_RUN = {
    **dict.fromkeys(
        (
            "check_array_api_input",
            "check_complex_data",
            "check_dtype_object",
            "check_estimator_sparse_array",
            "check_estimator_sparse_matrix",
            "check_estimator_sparse_tag",
            "check_estimators_dtypes",
            "check_estimators_empty_data_messages",
            "check_estimators_nan_inf",
            "check_estimators_partial_fit_n_features",
            "check_fit1d",
            "check_fit2d_1feature",
            "check_fit2d_1sample",
            "check_fit2d_predict1d",
            "check_n_features_in",
            "check_n_features_in_after_fitting",
            "check_positive_only_tag_during_fit",
            "check_supervised_y_2d",
            "check_supervised_y_no_nan",
            "check_requires_y_none",
            "check_classifiers_regression_target",
            "check_classifier_data_not_an_array",
        ),
        _NUMBERS,
    ),
    **dict.fromkeys(
        (
            "check_all_zero_sample_weights_error",
            "check_class_weight_balanced_linear_classifier",
            "check_class_weight_classifiers",
            "check_classifiers_one_label_sample_weights",
            "check_sample_weight_equivalence_on_dense_data",
            "check_sample_weight_equivalence_on_sparse_data",
            "check_sample_weights_list",
            "check_sample_weights_not_an_array",
            "check_sample_weights_not_overwritten",
            "check_sample_weights_pandas_series",
            "check_sample_weights_shape",
        ),
        _WEIGHTS,
    ),
    "check_classifiers_classes": "wants `classes_` sorted; a Learner's are in order of arrival",
    "check_classifiers_one_label": "wants numbers of one type back; a Learner gives names as they were given",
    "check_classifiers_train": "wants scores of two classes as one column, and a high accuracy on blobs of numbers",
    "check_decision_proba_consistency": "wants scores of two classes as one column",
    "check_do_not_raise_errors_in_init_or_set_params": "a Learner refuses wrong settings at once, before any data",
    "check_set_params": "the same: it sets settings to nonsense",
    "check_dont_overwrite_parameters": "wants every attribute that fit adds to end in an underscore",
    "check_methods_subset_invariance": "a network rounds otherwise in batches of another size, by 1e-6",
    "check_estimator_tags_renamed": "about the tags of older versions of scikit-learn",
    "check_estimators_pickle": "a Learner is saved without pickle: `save`, `load`",
    "check_estimators_unfitted": "wants scikit-learn's NotFittedError; ours says the same in a ConfigError",
    "check_fit_check_is_fitted": "wants to be asked by check_is_fitted, which looks for attributes that fit has added",
    "check_no_attributes_set_in_init": "wants an __init__ that stores parameters and nothing else",
    "check_non_transformer_estimators_n_iter": "about iterative solvers that count their iterations",
    "check_pipeline_consistency": "about pipelines of numbers; pictures and texts come first in ours",
    "check_sparsify_coefficients": "about the coefficients of linear models",
}


@pytest.mark.parametrize("name", RUN)
def test_estimator_check(tiny: Any, name: str) -> None:
    learner = OnTables("simplecil", backbone=tiny.vit)
    getattr(estimator_checks, name)("OnTables", learner)


def test_every_check_of_a_classifier_is_run_or_named() -> None:
    checks = estimator_checks._yield_all_checks(SGDClassifier(), legacy=True)
    assert {getattr(check, "func", check).__name__ for check in checks} == {*RUN, *NOT_RUN}
