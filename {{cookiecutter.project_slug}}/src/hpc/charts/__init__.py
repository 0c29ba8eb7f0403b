"""Line charts as SVG and PNG."""
