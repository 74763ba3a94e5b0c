"""Fingerprints of shipped prompts from before a prompt was known by its rendered text.

Runs made by the commits from 75082c1 on recorded a hash of the template's source, the task's name and its settings.
The prompts are the same texts still. Closed: what is recorded now is the fingerprint of `prompt_print`.
"""

from __future__ import annotations

OLD_PROMPTS: dict[str, tuple[str, ...]] = {
    "ee2e7db0d9e6824d51bfaec10ff7a110bbef0750a3c19b3dc8b8fe1682f5f436": (
        "ebf9e6cc62ffefcd6d449596555945c93cf4385a8b99ed4d59371b0d7655b7c9",
    ),
    "915eba7b1ebfac82416126e1c9744251c214b198808f291c9ef30fbb2949cdce": (
        "0ec26e0e4520eaca1b94204b2cbd65976bfe8cf3d5b68a4b0e1cff60fadd95d2",
    ),
    "1ea608e0f51f0b9703674880532cbc628c167801e521d857fde7069ed812cd5d": (
        "581f008e9003a08744ad93ad438c5d0844cfcbb540fab04f8586d403d9c8bf05",
    ),
    "1de658e95d8806556cedb71b859c8c01129fa4a6975646f8deb5c7a119e0a3de": (
        "0366a845c198ca52b75c296699699f6d5cbd4e8b09f113b5bcd279d5da97a24f",
    ),
    "02bdcc1ba400a9d5e28f072f10d918509b51d96e6bdca3c2b68a4a3b8abb1625": (
        "67136e8dc158c010086293894dbff487bcab8d1a15632c5c4c96d46c246db2fb",
    ),
    "cca60209007e8e3139bbff9ac501db639482847261e06b82ec32ab7b74ab057f": (
        "1200b2f46388b4e16a4ab4c9a99b9e7d23a4289e8142adf5ffdd65407334e275",
    ),
    "2d223ff8310aca9f9fe88dd052c33929c9b5dc8e740a3a1522247c084160ef19": (
        "d5dda6ed02085d7a38b76d72517e0e785cad8f4cf0a31119eabfac442b0c83e0",
    ),
    "c38290d4b363b344a1ce11ae185b3897d400b89a5ae9dd016e2b31dfd8bdc788": (
        "d1cc99571167a313448867a0995c229d1bcbbf567b3fc5951e4df2d171a96020",
    ),
    "e40cacbe07d3f524262db6bd10cdc97ba92659126d69f07a1702a3e8048ccccf": (
        "e8dde27b005e1fd6ab1a6388e5807dcc81d2431c594c8a522acb8bb921a0dda1",
    ),
    "b2aa11ab5dd73b44097e9357f9102a8155f0a0e7e10ff8862fec66b25b1328de": (
        "daed23739996368ca5250a66640ed69fe306d1f3e68ab6a7ac177c9418cf8ee2",
    ),
    "05ee460298aa1c0c7ea16f8f9d2e432284b7e8b450f4d7ff043eb7bc97ded0f2": (
        "1162b48d4de97a3b8e0b4e505e0f56d07d16110970bca4396066bbbb830e426a",
    ),
    "873ca7fdb12de61d7a2ce22ea53a22e73927410d1c7ecb2f8cabf7d69e65f1e1": (
        "92c832db02c7b3f96b34722e5932825d37b0f9f80704e9c5770aa762fdf49800",
    ),
    "2fc9618953b44021baf39c2518899b3e69f13b8f2d6570f57ca10eb1cbe241dd": (
        "727bc1a92f0dde646b590e2c5230df8b80e76a7567c880e9f46bf23d80f5adc9",
    ),
    "5af6821d43fab41fca91eab19fcff7b5f8b75db529b178949114b7353992c691": (
        "45a28d332c7938a79146a4ff167f79c89d2e40700f01fd075b4040fb86144c28",
    ),
    "a797fdf400a62492a59f72cb4c4c5c9c42da891407b0d2e9ef8856f594b1671b": (
        "555d94f6c24dc1b64e5b47c3acbdeef625c9b3066b5d61ceefac5bd987a692cf",
    ),
}
"""Fingerprint of a prompt -> those that earlier runs recorded for it, without a system message."""
