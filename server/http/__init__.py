"""Processes, connections and their limits, and the application behind them."""
