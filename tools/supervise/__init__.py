"""Run the processes of one deployment as one unit: start, watch, restart, stop, clean up."""
