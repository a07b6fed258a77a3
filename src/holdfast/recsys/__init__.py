"""Models and data to train them on: DLRM, DeepFM, PNN; Criteo and Parquet files; synthetic clicks.

    data/: a click stream, or files of Criteo and Parquet -> Batch -> models/ -> auc.py

Not here: the training loop and anything about checkpoints.
"""

from holdfast.recsys.auc import auc
from holdfast.recsys.data.batch import Batch
from holdfast.recsys.data.clicks import ClickReader, ClickStream
from holdfast.recsys.data.criteo import CriteoFiles, criteo_reader, day_files
from holdfast.recsys.data.parquet import Columns, ParquetFiles, parquet_reader
from holdfast.recsys.data.reader import FileReader, read_codes
from holdfast.recsys.data.skew import Skew, expected_touched, skew_for_touched
from holdfast.recsys.data.vocabulary import HashedIds, Vocabulary, build_vocabulary
from holdfast.recsys.models.deepfm import DeepFM
from holdfast.recsys.models.dlrm import DLRM
from holdfast.recsys.models.layers import split_parameters
from holdfast.recsys.models.pnn import PNN
from holdfast.recsys.models.presets import CRITEO_KAGGLE_ROWS, PRESETS, make_model, scaled_rows

__all__ = [
    "CRITEO_KAGGLE_ROWS",
    "DLRM",
    "PNN",
    "PRESETS",
    "Batch",
    "ClickReader",
    "ClickStream",
    "Columns",
    "CriteoFiles",
    "DeepFM",
    "FileReader",
    "HashedIds",
    "ParquetFiles",
    "Skew",
    "Vocabulary",
    "auc",
    "build_vocabulary",
    "criteo_reader",
    "day_files",
    "expected_touched",
    "make_model",
    "parquet_reader",
    "read_codes",
    "scaled_rows",
    "skew_for_touched",
    "split_parameters",
]
