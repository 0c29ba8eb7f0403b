"""The page of a plan: rate and efficiency over the number of nodes. Imported only where it is written."""

from pathlib import Path

from hpc.charts import page
from hpc.charts.chart import Chart, Series
from hpc.config.errors import ConfigError
from hpc.plan.prediction import Prediction


def write_page(prediction: Prediction, file: Path, *, title: str) -> None:
    """Write the page of a prediction. Raises `ConfigError` if it cannot be written."""
    try:
        page.write_page(scaling_charts(prediction), file, title=title)
    except OSError as error:
        raise ConfigError("plot", file, f"Cannot write this file: {error.strerror}", "plot=plan.html") from None


def scaling_charts(prediction: Prediction) -> list[Chart]:
    """Return a chart of the rate and one of the efficiency over nodes."""
    rate_series, efficiency_series = [], []
    for name, kind in {"same global batch": "strong", "same batch per GPU": "weak"}.items():
        rates = [(row.nodes, rate) for row in prediction.scaling if (rate := getattr(row, kind))]
        rate_series.append(Series(name, [(nodes, rate.rate) for nodes, rate in rates]))
        efficiency_series.append(Series(name, [(nodes, 100 * rate.efficiency) for nodes, rate in rates]))
    unit = f"{prediction.trace.unit} per second"
    return [
        Chart("Predicted rate", "nodes", unit, rate_series, log_x=True, log_y=True),
        Chart("Predicted efficiency", "nodes", "% of the rate per GPU on one node", efficiency_series, log_x=True),
    ]
