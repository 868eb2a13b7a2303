"""The names that every view uses for causes, phases, ratios and operations, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """One cause of ATTRIBUTION.md §6.

    colour has a relative luminance of 0.13 to 0.30, so that it stands out (≥ 3:1) on white and on near-black
    alike; causes of one family share a hue, and `pattern` (plotly's pattern shapes) tells them apart.
    """

    name: str
    label: str
    colour: str
    pattern: str
    family: str
    meaning: str


CAUSES: tuple[Cause, ...] = (
    Cause("warmup", "warmup", "#2f7ed8", "/", "schedule",
          "Waiting for the first micro-batches to arrive while the pipeline fills. Intrinsic: only another "
          "schedule or more micro-batches recover it."),
    Cause("cooldown", "cooldown", "#2566b0", "\\", "schedule",
          "Waiting for the last micro-batches to come back while the pipeline drains. Intrinsic, like warmup."),
    Cause("schedule_steady", "schedule, steady", "#4a90e2", "x", "schedule",
          "Waiting that the order of operations forces between fill and drain. Intrinsic, like warmup."),
    Cause("stage_imbalance", "stage imbalance", "#d55e00", "", "imbalance",
          "Waiting because some stages have more work per micro-batch than others, or divide theirs differently "
          "into F, I and W. Negative where a busier stage idles less than it would in a balanced pipeline."),
    Cause("slow_worker", "slow worker", "#b84a00", ".", "imbalance",
          "Waiting because one GPU is slower than the other replicas of the same stage."),
    Cause("transient", "transient", "#e0702a", "-", "imbalance",
          "Waiting because single operations took longer than their usual time."),
    Cause("microbatch_imbalance", "micro-batch imbalance", "#c9622f", "|", "imbalance",
          "Waiting because micro-batches differ in size: forward and backward times vary together."),
    Cause("p2p_transfer", "P2P transfer", "#c2408f", "", "communication",
          "Waiting while activations or gradients travel between stages."),
    Cause("exposed_collective", "exposed collective", "#a8327a", "+", "communication",
          "Waiting in collectives (gradient reduction, grad norm, embedding) that no compute hides."),
    Cause("optimizer", "optimizer", "#96780a", "|", "step end",
          "Waiting for the optimizer step of other GPUs."),
    Cause("host_launch", "host launch", "#008f6b", "", "host",
          "The GPU could have run, but the host had not launched the work."),
    Cause("data_loading", "data loading", "#007d5e", ".", "host",
          "Waiting for the input of the first stage."),
    Cause("unexplained", "unexplained", "#7a7f87", "x", "unexplained",
          "What the replay does not reproduce: replay minus measured. Above 5 % of the step the attribution is "
          "not to be trusted."),
)  # fmt: skip

CAUSE = {cause.name: cause for cause in CAUSES}
NEGATIVE = (
    "A negative cause shortens the waiting: without it these GPUs would idle longer, as a stage with more work idles "
    "less than it would in a balanced pipeline. All causes, negative ones too, sum to the idle time."
)
RUNGS = ("upstream_s", "peer_host_s", "late_recv_s", "transfer_s", "own_host_s")

RATIOS: tuple[tuple[str, str, str], ...] = (
    ("fraction", "bubble / makespan", "The headline, over measured step windows. Used by GPipe and Chimera."),
    ("over_ideal", "bubble / (m(F+B))", "Used by Megatron-LM (SC'21) and Llama 3. The same bubble gives a larger "
     "number here than in fraction."),
    ("own_span_rate", "(cost - m(F+I+W)) / cost", "Cost is the longest first-start-to-last-end over the stages. "
     "Used by Zero Bubble (ICLR'24)."),
    ("straggler_waste", "1 - T_ideal / T", "Not a bubble measure: what equal, undisturbed operations would save. "
     "Used by \"Understanding Stragglers\" (OSDI'25)."),
    ("gpu_idle_fraction", "idle / window", "Over all GPUs seen, over measured step windows."),
)  # fmt: skip

PHASES: tuple[tuple[str, str], ...] = (
    ("warmup", "before the GPU's first backward starts"),
    ("steady", "between warmup and cooldown"),
    ("cooldown", "after the GPU's last forward ends"),
)

TERMS: tuple[tuple[str, str], ...] = (
    ("window", "From the end of the last optimizer kernel of one step to that of the next, on one GPU."),
    ("busy", "Time in which a compute kernel runs. A communication kernel is never busy: it spins until its peer "
     "arrives."),
    ("idle", "Window minus busy: exposed communication, copies and empty time."),
    ("exposed_comm", "Time in communication kernels that no compute hides."),
    ("copies", "Time in memory copies that neither compute nor communication hides."),
    ("empty", "Time in which nothing runs on the GPU."),
    ("negative cause", NEGATIVE),
    ("stage", "One of the p parts into which the model's layers are cut; a GPU holds one or more."),
    ("micro-batch", "One of the m parts into which a step's input is cut."),
    ("F, B, I, W", "Forward; full backward; its input-gradient part; its weight-gradient part. B = I + W."),
    ("excess_compute", "Compute above its base time. Busy-side loss, never part of idle."),
    ("contention", "Compute that is slower while a communication kernel runs. Busy-side loss, never part of "
     "idle."),
    ("first-in", "Measured step time minus the replayed step time when only this cause is fixed."),
    ("Shapley", "The average saving of fixing a cause, over all orders in which the causes could be fixed."),
)  # fmt: skip

OPERATIONS = {
    "F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "loss": "loss",
    "recompute": "recompute", "optimizer": "optimizer", "other": "other compute",
}  # fmt: skip
