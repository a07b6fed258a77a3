"""Numbers for dashboards, made of events and of nothing else.

event -> readings.py (which metrics it changes) -> counts.py (their values)
      -> endpoint.py (Prometheus reads them over HTTP) | tensorboard.py (scalars by step)

metrics = Metrics()
with serve(metrics, port=9400):
    ck = hf.Checkpointer(url, model=model, optimizer=optimizer, events=metrics)
"""

from holdfast.metrics.counts import Metrics
from holdfast.metrics.endpoint import serve
from holdfast.metrics.tensorboard import TensorBoard

__all__ = ["Metrics", "TensorBoard", "serve"]
