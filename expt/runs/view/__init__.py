"""Run folders as a person sees them: progress, leaderboard, comparison, curves."""
