"""Mathematics problems with one exact answer: the tasks geometry3k, mm_math, geoqa and text_math."""
