"""The launcher of Slurm: a run becomes a batch job, whose tasks srun starts."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.launchers.batch import options as batch
from torsh_trainer.launchers.job_folder import FOLDER, OUTPUT, JobHandle, JobStatus
from torsh_trainer.launchers.plan import JobRequest, PlannedFile
from torsh_trainer.launchers.slurm import options, told
from torsh_trainer.launchers.slurm.script import write_script
from torsh_trainer.launchers.submission import SubmissionPlan, SubmitLauncher, run_client

_ID = re.compile(r"(\d+)(?:;\S+)?\s*$")


@dataclass(frozen=True)
class SlurmLauncher(SubmitLauncher):
    """Submits the run with sbatch; srun starts ``nodes`` times ``ntasks_per_node`` processes.

    ``ntasks_per_node`` auto is ``gpus_per_node``, else 1. What is None is left to Slurm: its
    defaults and the ``SBATCH_...`` variables. ``time`` is Slurm's own notation, with a colon or a
    dash. ``signal`` (USR1@SECONDS) has the run save so long before its limit. ``requeue`` has a
    job that was preempted, reached its limit or lost a node wait again and go on from its
    checkpoint. ``container_...`` are the flags of pyxis. ``sbatch_options`` and ``srun_options``
    are further long options, each one word. ``python`` is the interpreter on the nodes; None is
    this one's path. ``wait_for_end`` keeps the command until the job has ended.

    Raises:
        ConfigError: a knob makes no sense, or an option belongs to one.
    """

    name = "slurm"
    client = "sbatch"

    nodes: int = 1
    ntasks_per_node: int | str = "auto"
    gpus_per_node: int | str | None = None
    cpus_per_task: int | None = None
    mem: str | int | None = None
    time: str | int | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    job_name: str | None = None
    output: str | None = None
    signal: str | None = "USR1@120"
    requeue: bool = True
    container_image: str | None = None
    container_mounts: tuple[str, ...] = ()
    sbatch_options: tuple[str, ...] = ()
    srun_options: tuple[str, ...] = ()
    python: str | None = None
    wait_for_end: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        batch.check_count("nodes", self.nodes)
        batch.check_count("cpus_per_task", self.cpus_per_task)
        if self.ntasks_per_node != "auto":
            batch.check_count("ntasks_per_node", self.ntasks_per_node)
        batch.check_gpus(self.gpus_per_node)
        batch.check_memory(self.mem)
        options.check_time(self.time, self.signal)
        for name in ("partition", "account", "qos", "constraint", "job_name", "output", "python"):
            batch.check_text(name, getattr(self, name))
        options.check_output(self.output)
        options.check_container(self.container_image, self.container_mounts)
        options.check_further("sbatch_options", self.sbatch_options, options.OWNED_BY_SBATCH)
        options.check_further("srun_options", self.srun_options, options.OWNED_BY_SRUN)

    @property
    def elsewhere(self) -> bool:
        return self.container_image is not None or self.python is not None

    @property
    def tasks_per_node(self) -> int:
        """Processes on each node."""
        if self.ntasks_per_node != "auto":
            return int(self.ntasks_per_node)
        return batch.count_gpus(self.gpus_per_node) or 1

    # -- SubmitLauncher --------------------------------------------------------------------------

    def plan(self, request: JobRequest) -> SubmissionPlan:
        script = request.run_dir / FOLDER / "submit.sh"
        content = write_script(
            request,
            srun=self._srun_words(request),
            python=self.python or request.python,
            requeue=self.requeue,
        )
        return SubmissionPlan(
            files=(*request.files, PlannedFile(script, content, 0o755)),
            commands=(("sbatch", *self._sbatch_words(request), str(script)),),
            run_dir=request.run_dir,
        )

    def check_site(self) -> None:
        """Refuses a container where srun has no such flags, and folders that are not there."""
        folder = None if self.output is None else Path(self.output).parent
        known = folder is not None and folder.is_absolute() and "%" not in str(folder)
        if known and folder is not None and not folder.is_dir():
            raise ConfigError(
                f"launcher.output={self.output}: there is no folder {folder}",
                fix="make it: Slurm would fail the job (0:53) without a word",
            )
        if self.container_image is None or shutil.which("srun") is None:
            return
        if "--container-image" not in run_client(("srun", "--help")).stdout:
            raise ConfigError(
                "launcher.container_image needs pyxis, and srun of this Slurm has no "
                "--container-image",
                fix="ask for the plugin pyxis, or leave launcher.container_image=null",
            )

    def log_file(self, handle: JobHandle, *, rank: int | None = None) -> Path:
        if rank is not None or self.output is None:
            return super().log_file(handle, rank=rank)
        return handle.home / self.output.replace("%j", handle.id)

    def read_id(self, output: str) -> str:
        found = _ID.search(output)
        if found is None:
            raise ResourceError(
                f"sbatch has submitted the job and told no number: {output.strip()[:200]!r}",
                fix="squeue --me shows it",
            )
        return found[1]

    def explain_refusal(self, said: str) -> ConfigError | ResourceError:
        return told.explain_refusal(said, self)

    def explain_output(self, text: str) -> str:
        return told.explain_tasks(text) or super().explain_output(text)

    def ask(self, handle: JobHandle) -> JobStatus | None:
        return told.ask(handle.id)

    def end(self, handle: JobHandle) -> None:
        self._cancel(handle.id)

    def ask_to_save(self, handle: JobHandle) -> None:
        self._cancel("--signal=TERM", handle.id)

    def _cancel(self, *words: str) -> None:
        done = run_client(("scancel", *words))
        if done.returncode:
            raise ResourceError(
                f"scancel: {done.stderr.strip()}", fix="scancel of a login node may do it"
            )

    # -- words -----------------------------------------------------------------------------------

    def _places(self) -> list[str]:
        """How many processes, and where: said to sbatch and to srun alike."""
        words = [
            f"--nodes={self.nodes}",
            f"--ntasks={self.nodes * self.tasks_per_node}",
            f"--ntasks-per-node={self.tasks_per_node}",
        ]
        # srun does not take this one over from sbatch since Slurm 22.05.
        if self.cpus_per_task is not None:
            words.append(f"--cpus-per-task={self.cpus_per_task}")
        return words

    def _sbatch_words(self, request: JobRequest) -> list[str]:
        name = self.job_name or "_".join(request.run_dir.parts[-2:])
        words = [
            "--parsable",
            f"--job-name={re.sub(r'[^0-9A-Za-z_.+-]', '_', name)}",
            f"--chdir={request.run_dir}",
            f"--output={options.write_output(request.run_dir, self.output or str(OUTPUT))}",
            "--open-mode=append",
            "--requeue" if self.requeue else "--no-requeue",
            *self._places(),
        ]
        for knob in options.PASSED_ON:
            value = getattr(self, knob)
            if value is not None:
                words.append(f"--{knob.replace('_', '-')}={value}")
        return [*words, *self.sbatch_options]

    def _srun_words(self, request: JobRequest) -> list[str]:
        words = [*self._places(), "--kill-on-bad-exit=1"]
        if self.container_image is not None:
            words += [
                f"--container-image={self.container_image}",
                f"--container-workdir={request.folder}",
            ]
            if self.container_mounts:
                words.append(f"--container-mounts={','.join(self.container_mounts)}")
        return [*words, *self.srun_options]
