"""The way to the brain. Start at `client.Uplink`; `desk.LeaseDesk` serves the local socket too."""
