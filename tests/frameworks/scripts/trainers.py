"""Lightning and Hugging Face trainers with our callback, and the trackers that are active meanwhile.

python trainers.py --losses out.json
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

import bubblescope


def lightning_model() -> Any:
    import lightning.pytorch as pl

    class Model(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(8, 8)

        def training_step(self, batch: Any, index: int) -> Any:
            with bubblescope.span("F", stage=0, microbatch=0):
                return torch.nn.functional.mse_loss(self.inner(batch[0]), batch[0])

        def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            with bubblescope.span("B", stage=0, microbatch=0):
                loss.backward()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Model()


def lightning(folder: str) -> dict[str, float]:
    import lightning.pytorch as pl

    from bubblescope.capture.integrations.lightning import BubblescopeCallback

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(32, 8)), batch_size=4)
    callback = BubblescopeCallback(folder)
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(lightning_model(), data)
    return dict(callback.results)


def huggingface_model() -> Any:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            with bubblescope.span("F", stage=0, microbatch=0):
                return {"loss": torch.nn.functional.mse_loss(self.inner(x), x)}

    return Model()


def huggingface(folder: str) -> dict[str, float]:
    from transformers import Trainer, TrainingArguments

    from bubblescope.capture.integrations.huggingface import BubblescopeCallback

    callback = BubblescopeCallback(folder)
    arguments = TrainingArguments(
        output_dir=f"{folder}-hf", max_steps=6, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    rows = [{"x": torch.ones(8)} for _ in range(48)]
    Trainer(model=huggingface_model(), args=arguments, train_dataset=rows, callbacks=[callback]).train()
    return dict(callback.results)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--losses", required=True)
    options = parser.parse_args()
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", MLFLOW_ALLOW_FILE_STORE="true")
    import mlflow
    import wandb

    here = Path(options.losses).parent
    mlflow.set_tracking_uri(f"file:{here / 'mlruns'}")
    run = wandb.init(project="p", dir=str(here))
    with mlflow.start_run() as active:
        said = {"lightning": lightning(str(here / "lightning"))}
        logged = mlflow.get_run(active.info.run_id).data.metrics
        summary = {name: run.summary.get(name) for name in said["lightning"]}
    run.finish()
    said["huggingface"] = huggingface(str(here / "huggingface"))
    Path(options.losses).write_text(json.dumps({**said, "mlflow": logged, "wandb": summary}))


if __name__ == "__main__":
    main()
