"""The accounts of a Slurm of tests: its database daemon, on a MariaDB of its own. Debian: slurmdbd, mariadb-server.

Both run on the login node of `slurm_nodes`, and end with it. The database is reached by a socket alone.
"""

import os
import shutil
import subprocess
from pathlib import Path

PROGRAMS = ("slurmdbd", "sacctmgr", "mariadbd", "mariadb-install-db", "mariadb")
DATABASE = """\
exec mariadbd --no-defaults --datadir={folder}/database --user=root --socket={folder}/database.socket \
    --pid-file={folder}/database.pid --skip-networking --skip-grant-tables --innodb-buffer-pool-size=16M \
    --innodb-lock-wait-timeout=900 >{folder}/database.log 2>&1 &
"""
DAEMON = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=login
DbdAddr={address}
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
"""
# For slurm.conf. Jobs need an account, and may not exceed the limits of their QoS.
ENFORCED = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={address}
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu
"""


def missing() -> str | None:
    """Return the reason why this machine cannot have accounts, or None."""
    path = f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"
    programs = [program for program in PROGRAMS if not shutil.which(program, path=path)]
    return f"not installed: {', '.join(programs)} (apt install slurmdbd mariadb-server)" if programs else None


def install_database(folder: Path) -> None:
    """Make the files of an empty database."""
    command = ["mariadb-install-db", "--no-defaults", f"--datadir={folder}/database", "--user=root", "--skip-test-db"]
    subprocess.run([*command, "--auth-root-authentication-method=normal"], check=True, capture_output=True)


def write_config(folder: Path, address: str, port: int) -> None:
    """Write slurmdbd.conf. Only its owner may read it, or the daemon refuses it."""
    file = folder / "slurmdbd.conf"
    file.touch(0o600)
    file.write_text(DAEMON.format(folder=folder, address=address, port=port))
