// Requests to the control plane. The token stays in this tab's session storage.

const TOKEN_KEY = "switchyard-token";
const TIMEOUT_MS = 8000;

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function storedToken() {
  return sessionStorage.getItem(TOKEN_KEY);
}

export function storeToken(token) {
  if (token) sessionStorage.setItem(TOKEN_KEY, token);
  else sessionStorage.removeItem(TOKEN_KEY);
}

// Sends one request and returns the parsed body, or null if it is empty. Throws ApiError; status 0 means that the
// control plane was not reached.
export async function call(method, path, body) {
  const headers = {};
  const token = storedToken();
  if (token) headers.authorization = `Bearer ${token}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  let text;
  try {
    response = await fetch(path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: AbortSignal.timeout(TIMEOUT_MS),
      cache: "no-store",
    });
    text = await response.text();
  } catch (error) {
    throw new ApiError(0, "unreachable", `no answer from the control plane: ${error.message}`);
  }
  if (!response.ok) {
    let detail = {};
    try {
      detail = JSON.parse(text, readable);
    } catch {
      // A proxy between page and control plane may answer with HTML. The status says enough.
    }
    throw new ApiError(response.status, detail.code ?? "", detail.message ?? `${method} ${path}: HTTP ${response.status}`);
  }
  try {
    return text ? JSON.parse(text, readable) : null;
  } catch {
    throw new ApiError(response.status, "bad_response", `${method} ${path}: the answer is not JSON`);
  }
}

// Incarnations are 64-bit numbers, which JavaScript would round. Only their text is needed. Control characters and those
// that change the direction of text are shown by their numbers: texts come from members and callers.
function readable(key, value, context) {
  if (typeof value === "string") return value.replace(DISRUPTIVE, (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`);
  return key === "incarnation" && context?.source ? context.source : value;
}

const DISRUPTIVE = /[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;
