"""Line charts, drawn as SVG for a page or as PNG, and the formatting of numbers.

Offers `chart` (Chart, Series, Band; `render_svg`, `write_png`), `axis.format_number` and the formats of `units`.
It needs no other room; Pillow is imported only to write a PNG.
"""
