"""Recording inside a training process.

Imports only `model` and `errors`. Importing this does not import torch: the job does that itself.
"""

from bubblescope.capture.recorder import Recording, instrument, record, span, step

__all__ = ["Recording", "instrument", "record", "span", "step"]
