"""``b70-replay doctor``: what this machine has, and which kernels can run here."""

import platform
from itertools import islice

import click


@click.command("doctor")
@click.option("--device", default="cpu", show_default=True, help="cpu, xpu[:N] or cuda[:N].")
@click.option("--selftest", is_flag=True, help="Ask the device to compute, and compare with the oracle to the bit.")
def command(device: str, selftest: bool) -> int:
    """Versions, the device, the SYCL runtime, and what every kernel lacks.

    Exit code 5 where a self-test fails: no bitwise claim on such a device is worth anything.
    """
    if selftest:
        return _selftest(device)
    from replay.devices import Device
    from replay.identity import PACKAGES, package_version
    from replay.kernels.registry import lacking, registered
    from replay.kernels.sycl import NEEDS

    found = Device(device)
    click.echo(f"device      {device}: {found.description()}, last-level cache {found.llc_bytes() >> 20} MiB")
    click.echo(f"python      {platform.python_version()}, {platform.platform()}")
    for package in PACKAGES:
        click.echo(f"{package:<31} {package_version(package)}")
    lacks = list(lacking(NEEDS))
    if lacks:
        click.echo(f"sycl        unavailable: {'; '.join(lacks)}")
    elif found.kind != "cuda":
        from replay.kernels.sycl.runtime import queue

        click.echo(f"sycl        {queue(found.kind).device_name}")
    for kernel in registered().values():
        why = [*islice(lacking(kernel.needs), 1)]
        if found.kind not in kernel.devices:
            why.append(f"runs on {', '.join(kernel.devices)}")
        click.echo(f"{kernel.id:<52} {'unavailable: ' + '; '.join(why) if why else 'available'}")
    return 0


def _selftest(name: str) -> int:
    from replay.devices import Device
    from replay.errors import EnvironmentRefused
    from replay.session.selftest import selftest, unasked

    device = Device(name)
    if why := unasked(name):
        raise EnvironmentRefused(f"doctor: --selftest: expected a device that runs SYCL, got {why}")
    findings = selftest(device)
    for found in findings:
        click.echo(str(found))
    return EnvironmentRefused.exit_code if any(f.wrong for f in findings) else 0
