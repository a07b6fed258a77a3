"""The area under the ROC curve, exactly: the number by which click models are compared.

Not here: collecting the predictions (the training loop does).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from holdfast.errors import InvalidRequestError

# N samples


def auc(labels_N: npt.ArrayLike, scores_N: npt.ArrayLike) -> float:
    """The chance that a random positive scores above a random negative; a tie counts half.

    Exact, from ranks. Any monotone score will do: logits or probabilities.

    >>> auc([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8])
    0.75

    Raises:
        InvalidRequestError: the lengths differ, a score is NaN, or a class is missing.
    """
    is_positive = np.asarray(labels_N).reshape(-1) > 0.5
    scores = np.asarray(scores_N, dtype=np.float64).reshape(-1)
    if is_positive.shape != scores.shape:
        raise InvalidRequestError(
            "labels and scores differ in length", labels=is_positive.size, scores=scores.size
        )
    if np.isnan(scores).any():
        raise InvalidRequestError(
            "a score is not a number", nans=int(np.isnan(scores).sum()), todo="check the loss"
        )
    positives = int(is_positive.sum())
    negatives = is_positive.size - positives
    if not positives or not negatives:
        raise InvalidRequestError(
            "auc needs both classes",
            positives=positives,
            negatives=negatives,
            todo="evaluate on more samples",
        )
    _, place, ties = np.unique(scores, return_inverse=True, return_counts=True)
    last_rank = np.cumsum(ties)
    mean_rank = last_rank - (ties - 1) / 2.0
    rank_sum = float(mean_rank[place.reshape(-1)[is_positive]].sum())
    return (rank_sum - positives * (positives + 1) / 2.0) / (positives * negatives)
