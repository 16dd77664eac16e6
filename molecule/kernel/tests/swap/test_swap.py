"""Right after a run. (systemd leaves the swap lines of /etc/fstab to the host when it runs in a container.)"""

from __future__ import annotations

from typing import Any


def test_swap_is_used(host: Any) -> None:
    assert "/swapfile.gb10-fleet" in host.check_output("cat /proc/swaps")
