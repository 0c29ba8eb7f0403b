"""Line charts on pages that one can zoom, read by hovering and save as PNG, and the formatting of numbers.

Offers `chart` (Chart, Series, Band), `page` (`render_charts` for charts, `render_page` for a page of other content) and
the formats of `units`. plotly.js, which comes with the package plotly, draws; its Python modules are not imported.
"""
