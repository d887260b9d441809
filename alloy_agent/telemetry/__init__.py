"""Signals to windows, gates, health, usage and metrics.

`signals`, `window`, `gates`, `health` and `metering` are pure: time is an argument. `catalogue`
holds what fault codes mean, as data. `journal` is the one file that is written here; `metrics` and
`dcgm` render pages. The daemon joins them.
"""
