"""The iterated prisoner's dilemma of dilemma.py, where each agent is paid what both earn: at best 6 a round.

python ippo_llm.py --env benchmark/games/dilemma_sum.py --num-turns 5 --max-new-tokens 2
"""

import dilemma


class TeamEnv(dilemma.TeamEnv):
    pays_the_sum = True
