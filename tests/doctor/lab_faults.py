"""Within the lab: three hosts, asked by agents that stay, healthy and under one fault at a time.

Writes ``told.json``: fault -> what was found. One session, since each start of three interpreters
takes longer than what they are asked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from torsh_trainer.doctor.between import compare_hosts
from torsh_trainer.doctor.command import _parser
from torsh_trainer.doctor.hosts import _look_at_all
from torsh_trainer.doctor.links import _try, try_links
from torsh_trainer.doctor.ssh import Agent, SshOptions
from torsh_trainer.errors import ResourceError


def on(host: str, words: str) -> None:
    subprocess.run([f"./run-{host}", *words.split()], check=True)


def refusals(folder: Path) -> dict[str, tuple[tuple[str, ...], str]]:
    """What keeps a doctor out -> words for ssh, and the Python that it asks for."""
    config, python = f"-F{folder}/ssh_config", sys.executable
    known = (f"-oUserKnownHostsFile={folder}/known_hosts",)
    (folder / "other_hosts").write_text(
        f"lab1 {' '.join((folder / 'user_key.pub').read_text().split()[:2])}"
    )
    return {
        "unknown": ((config, "-oUserKnownHostsFile=/dev/null"), python),
        "changed": ((config, f"-oUserKnownHostsFile={folder}/other_hosts"), python),
        "key": (("-F/dev/null", *known, f"-oIdentityFile={folder}/host_key"), python),
        "port": ((config, "-p2222"), python),
        "python": ((config,), "/no/such/python"),
    }


def refuse(words: tuple[tuple[str, ...], str]) -> str:
    try:
        with Agent("lab1", SshOptions(*words)) as agent:
            agent.ask("tell_time")
    except ResourceError as error:
        return str(error)
    return "it was let in"


def main(folder: Path) -> None:
    ssh = SshOptions((f"-F{folder}/ssh_config",), sys.executable)
    options = _parser().parse_args(["--dir", str(folder / "runs")])
    agents = [Agent(f"lab{number}", ssh) for number in (1, 2, 3)]
    told: dict[str, Any] = {}

    def look(only: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        looked = _look_at_all(agents, options, only=only)
        facts = {host: one["facts"] for host, one in looked.items()}
        found = compare_hosts(agents, facts, folder=options.dir, patience_s=2)
        rows = [one.as_dict() for one in found]
        for host, one in looked.items():
            rows += [
                {**row, "name": f"{host} {row['name']}"}
                for row in one["examination"]["checks"]
                if row["outcome"] == "finding"
            ]
        return rows

    def try_network() -> list[dict[str, Any]]:
        report = try_links(agents, promised=None, port=29500, seconds=0.5)
        told.setdefault("network", report.as_dict())
        return [one.as_dict() for one in report.findings]

    told["healthy"] = look()
    for _ in range(3):  # a machine that is busy with other tests may be too slow for a moment
        if not (slow := try_network()):
            break
    told["healthy"] += slow
    on("lab3", "iptables -A INPUT -p tcp ! --dport 22 -m length --length 1200:65535 -j DROP")
    told["large"] = try_network()
    on("lab3", "iptables -F")
    on("lab3", "tc qdisc add dev eth0 root tbf rate 20mbit burst 32kbit latency 400ms")
    told["slow"] = try_network()
    on("lab3", "tc qdisc del dev eth0 root")
    for host, right, wrong in (
        ("lab2", "10.99.0.2 lab2", "127.0.1.1 lab2"),
        ("lab3", "10.99.0.1 lab1", "10.99.0.3 lab1"),
    ):
        names = folder / f"hosts-{host}"
        names.write_text(names.read_text().replace(right, wrong))
    on("lab2", "ip link set eth0 mtu 1400")
    on("lab3", f"mount -t tmpfs own {folder}/runs")
    told["names"] = look(("host_name_loopback", "interfaces"))
    # Both know themselves by the loopback now; gloo tries five times as long as it is told.
    names = folder / "hosts-lab1"
    names.write_text(names.read_text().replace("10.99.0.1 lab1", "127.0.1.1 lab1"))
    told["mesh"] = str(_try(agents[:2], port=29500, seconds=0.2, timeout_s=1.0))
    for agent in agents:
        agent.__exit__()
    told["refusals"] = {title: refuse(words) for title, words in refusals(folder).items()}
    (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
