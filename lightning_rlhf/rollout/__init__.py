"""Everything that happens outside the module to make a rollout: engines, weight pushes, rewards' dispatch."""
