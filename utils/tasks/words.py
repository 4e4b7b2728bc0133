"""Word lists that rewards count with."""

# Phrases that join sentences, in the twelve categories of arXiv 2508.04652's reward; alternatives of a regex
TRANSITIONS = {
    "elaboration": "also|besides|furthermore|moreover|in addition",
    "example": "for example|for instance|especially|such as",
    "explanation": "in fact|actually|in other words|that is",
    "cause": "so|therefore|thus|as a result|because",
    "contrast": "but|however|instead|on the other hand",
    "sequence": "first|then|next|after that|finally",
    "emphasis": "indeed|certainly|of course|clearly",
    "summary": "in short|in summary|overall|in the end",
    "comparison": "similarly|likewise|just like|equally",
    "concession": "although|though|still|yet|even so",
    "condition": "if|unless|otherwise|as long as",
    "time": "when|before|after|later|while|now",
}
# Words that carry no content of their own
STOPWORDS = set(
    "a about am an and are as at be but by did do for from had has have he her him his i if in is it its me my no not "
    "of on or our out she should so that the their them then there they this to up was we were will with would you "
    "your".split()
)
