"""Texts with secrets in them, in as many spellings as we know, and texts that only look as if they had any."""

from __future__ import annotations

import base64
import hashlib

VALUE = "Zx9Qm2Lp8Rt4Kw7Nb3"
HEX = "3f786850e387550fdab836ed7e6dc881de23001b"
LONG = VALUE * 2
PASSWORD = "hunter2"
KEY_LINES = ("MIIEpAIBAAKCAQEA7bq0Zm9v", "YmFyYmF6cXV4cXV1eGNvcmdl")
PEM = "-----BEGIN RSA PRIVATE KEY-----\n{}\n{}\n-----END RSA PRIVATE KEY-----".format(*KEY_LINES)
BASIC = base64.b64encode(b"user:" + PASSWORD.encode()).decode()
PARTS = (VALUE, HEX, PASSWORD, BASIC, *KEY_LINES, "XyZ1w0rd", "B00000000", "c0rrect horse", "p@ss", "w;rd",
         "correct-horse", "abandon ability")  # fmt: skip
"""What must not be left of any of them."""

SERVICES = [
    f"hf_{LONG}", f"npm_{LONG}", f"gsk_{LONG}", f"r8_{LONG}", f"sk-proj-{LONG}", f"sk-ant-api03-{LONG}", f"ghp_{LONG}",
    f"github_pat_{LONG}", f"glpat-{LONG}", f"AIza{LONG}", "AKIA" + "IOSFODNN7EXAMPLE", f"xoxb-12-34-{LONG}",
    f"pypi-AgEIcHlwaS5vcmc{LONG}", f"nvapi-{LONG}", f"pplx-{LONG}", f"sk_live_{LONG}", f"SG.{VALUE}.{LONG}",
    f"dckr_pat_{LONG}", f"123456789:AAF-{VALUE}{VALUE[:13]}", f"hvs.{LONG}", f"dapi{HEX[:32]}",
    f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.{LONG}",
]  # fmt: skip
"""Tokens that a service gives out: seen wherever they stand."""

ADDRESSES = [
    f"https://user:{PASSWORD}@host/x", f"postgres://user:p@{PASSWORD}@host:5432/db", f"https://{VALUE}@github.com/a/b.git",
    f"https://api.x.y/v1?page=2&token={VALUE}&n=3", "https://x.blob.core.windows.net/c?sv=2020&sig=XyZ1w0rd%3D",
    f"GET /v1/rows?api_key={VALUE} HTTP/1.1", f"https://x.y/#access_token={VALUE}",
    f"https://hooks.slack.com/services/T00000000/B00000000/{LONG}", f"https://discord.com/api/webhooks/12345/{LONG}",
    f'url = f"https://x.y/?token={VALUE}&u={{user}}"', f"SENTRY_DSN=https://{HEX[:32]}@o1.ingest.sentry.io/12",
]  # fmt: skip

HEADERS = [
    f"Authorization: Bearer {LONG}", f'headers = {{"Authorization": "Basic {BASIC}"}}', f"authorization: Basic {BASIC}",
    f'"Authorization": f"Token {LONG}"', f"X-Api-Key: {VALUE}", f"Cookie: session={VALUE}; lang=en",
    f"curl -u admin:{PASSWORD}! https://x.y", f"machine api.wandb.ai\n  login me\n  password {HEX}",
    f"sshpass -p {PASSWORD} ssh host",
]  # fmt: skip

ASSIGNMENTS = [
    f'os.environ["X_API_KEY"] = "{VALUE}"', f"os.environ['DB_PASSWORD']='{PASSWORD}'",
    f'os.environ.setdefault("X_TOKEN", "{VALUE}")', f'os.putenv("X_SECRET", "{VALUE}")',
    f'monkeypatch.setenv("OPENAI_API_KEY", "{VALUE}")', f'os.getenv("X_TOKEN", "{VALUE}")', f'key: str = "{VALUE}"',
    f'api_key: str | None = "{PASSWORD}"', f'def ask(prompt: str, token: Optional[str] = "{VALUE}") -> str:',
    f'self.password: Final[str] = "{PASSWORD}"', f'password = "{PASSWORD}"', "passphrase = 'c0rrect horse battery'",
    f'api_keys = ["{VALUE}a", "{VALUE}b"]', f'TOKENS: list[str] = [\n    "{VALUE}",\n    "{VALUE}x",\n]',
    f'KEYS = ("{VALUE}", "b")', f'keys = {{"openai": "{VALUE}", "other": "{VALUE}2"}}', f'login="{HEX}"',
    f'wandb.login("{HEX}")', f"wandb.login(key='{HEX}')", f"wandb login {HEX}", f'set_api_key("{VALUE}")',
    f'user, password = "me", "{PASSWORD}"', f'api_key = ("{PASSWORD}" "abc")', f'if password == "{PASSWORD}":',
    f'{{\\"api_key\\": \\"{VALUE}\\"}}', f'{{"clientSecret": "{PASSWORD}"}}', f"<password>{PASSWORD}</password>",
    f"export HF_TOKEN={VALUE}", f"WANDB_API_KEY={HEX} vlmrl train r.toml", f"--api-key {VALUE} --n 3",
    f"--password {PASSWORD}", f'["--token", "{VALUE}", "--n"]', f"password: {PASSWORD}", f"+    token = '{VALUE}'",
    f"Server=x;User Id=y;Password={PASSWORD};Database=z", f"SECRET_KEY_BASE={VALUE}", f'API_KEY_OPENAI = "{VALUE}"',
    f"token = '''{VALUE}'''", f'token = rb"{VALUE}"', f'key = f"{VALUE}"', f'hf_token := "{VALUE}"', PEM,
    '"private_key": "-----BEGIN PRIVATE KEY-----\\n{}\\n{}\\n-----END PRIVATE KEY-----\\n"'.format(*KEY_LINES),
]  # fmt: skip

MORE_SERVICES = [
    f"patAbCdEfGhIjKlMn.{HEX}{HEX[:24]}", f"tskey-auth-{VALUE}-{LONG}", f"pscale_tkn_{LONG}", f"rubygems_{HEX}00000000",
    f"secret_{LONG}{VALUE[:7]}", f"key-{HEX[:32]}", f"vcp_{LONG}", f"tvly-{LONG}", f"e2b_{HEX}", f"HRKU-{LONG}",
    f"apify_api_{LONG}", f"ops_eyJ{LONG}", f"glc_eyJ{LONG}", f"sgp_{HEX}", f"CCIPAT_{VALUE}abcd_{HEX}",
    f"abcdefGH1234xy.atlasv1.{LONG}{VALUE}", f"$6$rounds=5000${VALUE[:16]}${LONG}{LONG}abcdefghij1234"[:121],
    f"$2b$12${LONG}{VALUE[:17]}", f"https://api.telegram.org/bot1234567890:AAF-{VALUE}{VALUE[:13]}/getMe",
    f"https://hooks.zapier.com/hooks/catch/1234/{VALUE}/", f"https://open.feishu.cn/open-apis/bot/v2/hook/{VALUE}",
]  # fmt: skip

PLACES = [
    f"https://h/x?code={VALUE}", f"JSESSIONID={VALUE}", f"PHPSESSID={VALUE};", f"Set-Cookie: sid={VALUE}; Path=/",
    f"csrftoken={VALUE}", f"mysql -u root -p{PASSWORD} db", f"docker login -u bob -p {PASSWORD} r.io",
    f"az login -u b -p {PASSWORD}", f"vault login {VALUE}", f"aws configure set aws_secret_access_key {VALUE}",
    f"zip -P {PASSWORD} a.zip", f"openssl enc -k {PASSWORD}", f"htpasswd -b f bob {PASSWORD}",
    f"echo {VALUE} | docker login -u bob --password-stdin r.io", f"Incorrect API key provided: {VALUE}.",
    f"ValueError: invalid api key {VALUE}", f"The password is {VALUE}.", f"old password was: {VALUE}",
    f"api_key {VALUE} rejected", f"ENV API_TOKEN {VALUE}", f"setx API_KEY {VALUE}", f"client-key-data: {LONG}==",
    f'<add key="ApiKey" value="{VALUE}" />', f'{{"name": "DB_PASSWORD", "value": "{PASSWORD}"}}',
    f"- name: API_TOKEN\n  value: {VALUE}", "machine h\n  login me\n  password c0rrect horse",
]  # fmt: skip

NAMES = [
    f"PGPASSWORD={VALUE} psql", f"MYSQL_PWD={VALUE}", f"export RABBITMQ_PASS={VALUE}", f'DBPASSWORD = "{PASSWORD}"',
    f'dbpass="{PASSWORD}"', f"userpass: {VALUE}", f'mypassword = "{PASSWORD}"', f'authtoken = "{PASSWORD}"',
    f'accesstoken="{VALUE}"', f"APITOKEN={VALUE}", f'wandbkey="{VALUE}"', f'masterkey="{PASSWORD}"',
    f'clientsecret="{PASSWORD}"', f"SMTP_PASSWD={PASSWORD}", f'pwd = "{PASSWORD}"', f"Uid=bob;Pwd={PASSWORD};",
    "password=p@ss,w;rd", 'DB_PASS = "correct-horse-battery"', 'mnemonic = "abandon ability able about above absent"',
    'passphrase = "abandon ability able about above absent"',
]  # fmt: skip

EXPRESSIONS = [
    f'api_key = \\\n    "{PASSWORD}"', f'conn(user="bob",\n     password=\n       "{PASSWORD}")',
    f'signing_key: "str" = "{PASSWORD}"', f'password = "" or "{PASSWORD}"', f'key = os.getenv("X_KEY") or "{VALUE}"',
    f'token = x if y else "{VALUE}"', f'token = prefix + "{VALUE}"', f'token = str("{VALUE}")',
    f'API_KEY = "%s" % "{PASSWORD}"', f'API_KEY = "{{}}".format("{PASSWORD}")', f"SECRET = ''.join(['{PASSWORD}'])",
    f'token = base64.b64decode(b"{VALUE}==")', f'token = bytes.fromhex("{HEX}")',
    f'logging.info("token=%s", "{VALUE}")', f'print("user=%s password=%s" % ("bob", "{PASSWORD}"))',
    f'HTTPBasicAuth("bob", "{PASSWORD}")', f'HTTPBasicAuth(user, "{PASSWORD}")', f'login("bob", "{PASSWORD}")',
    f'keyring.set_password("svc", "bob", "{PASSWORD}")', f'{{\n "api_key"\n : "{PASSWORD}"}}',
    f'password = config.get("pw", "{PASSWORD}")',
]  # fmt: skip

SECRETS = [
    *SERVICES, *ADDRESSES, *HEADERS, *ASSIGNMENTS, *MORE_SERVICES, *PLACES, *NAMES, *EXPRESSIONS,
]  # fmt: skip

_BYTES = hashlib.sha512(b"pixels").digest() * 300
INNOCENT = [
    "max_tokens=4096", "max_new_tokens = 4096", "tokens: 4,096 of 8,192 (50%)", "token = 12345", 'pad_token = "<pad>"',
    'stop_token = "<|im_end|>"', "eos_token: </s>", "tokenizer.pad_token = tokenizer.eos_token",
    "'tokenizers': '0.22.1'",
    'monkey = "a1b2c3d4e5f6g7"', f"commit {HEX}", f"fingerprint {HEX}", f"sha256: {hashlib.sha256(b'').hexdigest()}",
    f'{{"fingerprint": "{hashlib.sha256(b"").hexdigest()}"}}', f'cache_key = "{HEX}"', f'password_hash = "{HEX}"',
    "uuid 550e8400-e29b-41d4-a716-446655440000", "20261122-212818-rl-c5f1", "checkpoints/step-000010/COMPLETE",
    f"data:image/png;base64,{base64.b64encode(_BYTES).decode()}", base64.b64encode(_BYTES[::-1]).decode(),
    "password = getpass()", 'getpass("Password: ")', 'input("Password: ")', 'api_key = os.environ["OPENAI_API_KEY"]',
    'os.environ.get("HF_TOKEN", "")', "client = Client(api_key=api_key, password=self.password)",
    "call(\n    api_key=api_key\n)", "def login(user: str, password: str) -> Token:", "key: bytes | None = None",
    'sorted(rows, key=lambda r: r["score"])', "max(found, key=itemgetter(1))", "token = tokens[i + 1]",
    'if key == "columns":', "auth = HTTPBasicAuth(user, pw)", 'print("token:", token, "x")',
    'parser.add_argument("--password", "-p", help="The password of the database")', '["username", "password", "email"]',
    'api_key_env = "OPENAI_API_KEY"', 'password_column = "pw"', 'secret_name = "prod/db"', 'KEYS = ("step", "kind")',
    'tokens = ["<image>", "<|im_start|>", "cat"]', 'api_key = "YOUR_API_KEY"', 'api_key = "<your key>"',
    "export HF_TOKEN=$HF_TOKEN", "password: ${DB_PASSWORD}", "--token TOKEN", "Authorization: Bearer $TOKEN",
    'f"Authorization: Bearer {token}"', 'f"postgres://{user}:{password}@{host}"', "git@github.com:a/b.git",
    "https://example.com:8080/a@b", "ssh://git@host/x", "https://example.com/page?id=12&tokens=5#key=value",
    r"$\mathrm{key} = \frac{1}{2}$", r"\section{Password} The key: $k_{12} = 3$",
    'The password is "swordfish". What is the password?', "Riddle: what is the password? Answer with one word.",
    "Find the password = the word in the second image.", "Q: What is the secret? A: <answer>0.25</answer>",
    "password: the word on the sign", "The secret ingredient = love", "<think>The key: it opens</think>",
    "<password>your answer</password>", 're.search(r"<password>(.*?)</password>", x.response)',
    "-----BEGIN CERTIFICATE-----\nMIIBIjANBgkqhkiG9w0BAQEFAAOCAQ8A\n-----END CERTIFICATE-----",
    "step 10: checkpoint saved (folder=step-000010)", "row key digits-12 of split test",
    "Basic information about tokens",
    "docker run -u 1000:1000 x", "npm_config_registry=https://r", 'model.path = "Qwen/Qwen2.5-VL-3B-Instruct"',
    'sk-learn", "task-oriented-dialogue-systems"', 'public_key = "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABAQ"',
    "for key, value in items.items():", "optim.lr = 1e-5", "session: training\nstep: 12",
    "@dataclass\nclass Token: x: int", "sk-learn-contrib-package-name-longer", "fw_configuration_of_networks",
    "machine learning password manager", "glove-word-embedding-vectors-300d", "compass: north-west-1", "bypass=True-1",
    'monkey = "Macaca_fuscata_123"', 'turkey = "a1b2c3d4e5f6g7"', 'hotkey = "ctrl+shift+p1"', "OLDPWD=/home/x1",
    "num_tokens = 12", "pass_at_k = 0.5", 'tokenizer = "Qwen/Qwen2.5-VL-3B-Instruct"', 'eostoken = "a1b2c3d4e5f6g7"',
    'keyboard = "qwerty-2000-layout"', "pwd = os.getcwd()", 'pwd = "/home/me/x1"', 'test_pass = "linear"',
    "password = a if b == 'mode-1' else c", 'key = config.get("cache-dir-1", "x")', "docker run -p 8080:80 image",
    'token = re.sub(r"[^a-z0-9]+", "", text)', 'password = input("Password (8+ characters): ")', "mysql --print x",
    "https://h/x?code=404", "the key is to see that 3x + 12y = 24", "The token was the 12th of 40",
    'token = names["3f786850e387550f"]', 'print("key=%s", "question")', 'login("first page", "second page")',
    "- name: steps\n  value: 12345", '{"name": "cache_key", "value": "a1b2c3d4e5f6g7"}', "set key A4 opens door",
    "sid=short", "cookie: chocolate chip", 'hint = "secret" if x else "no secret 12"',
]  # fmt: skip
