"""Models and data to train them on: DLRM, DeepFM, PNN; Criteo and Parquet files; synthetic clicks.

    clicks.py, or files -> criteo.py / parquet.py -> reader.py  -> Batch -> a model -> auc.py

Not here: the training loop and anything about checkpoints.
"""

from holdfast.recsys.auc import auc
from holdfast.recsys.batch import Batch
from holdfast.recsys.clicks import ClickReader, ClickStream
from holdfast.recsys.criteo import CriteoFiles, criteo_reader, day_files
from holdfast.recsys.deepfm import DeepFM
from holdfast.recsys.dlrm import DLRM
from holdfast.recsys.layers import split_parameters
from holdfast.recsys.parquet import Columns, ParquetFiles, parquet_reader
from holdfast.recsys.pnn import PNN
from holdfast.recsys.presets import CRITEO_KAGGLE_ROWS, PRESETS, make_model, scaled_rows
from holdfast.recsys.reader import FileReader, read_codes
from holdfast.recsys.skew import Skew, expected_touched, skew_for_touched
from holdfast.recsys.vocabulary import HashedIds, Vocabulary, build_vocabulary

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
