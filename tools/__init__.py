"""Tools for developing this package, which it does not need to run or to be tested."""
