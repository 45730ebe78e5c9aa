"""One decode step of a layer between its projections, in one kernel."""
