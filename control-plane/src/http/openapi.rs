//! The OpenAPI document, and its handler.
//!
//! The attributes of the handlers describe what a route does. The checks before every route add their part here, from
//! the list of routes: roles, and the responses of a refused request.

use std::sync::LazyLock;

use axum::body::Bytes;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use utoipa::OpenApi;

use super::{all_routes, digests, forward, models, routes, tickets, watch};
use crate::access::Rule;

/// This document.
#[utoipa::path(get, path = "/openapi.json", tag = "probes", security(()),
    responses((status = 200, description = "OpenAPI document", body = Object)))]
pub(super) async fn openapi_json() -> Response {
    static TEXT: LazyLock<Bytes> = LazyLock::new(|| Bytes::from(document().to_string()));
    ([(CONTENT_TYPE, "application/json")], TEXT.clone()).into_response()
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Switchyard control plane",
        description = "Membership (leases) and placement (epochs) of a Switchyard fleet."
    ),
    paths(
        routes::healthz,
        routes::readyz,
        routes::metrics,
        openapi_json,
        routes::placement,
        watch::placement_watch,
        digests::model_digests,
        digests::store_model_digests,
        models::models,
        models::add_model,
        models::switch_model,
        models::abort_update,
        models::report_clients,
        routes::leader,
        routes::whoami,
        routes::status,
        routes::advice,
        routes::events,
        routes::audit,
        routes::goals,
        routes::set_goals,
        routes::members,
        routes::register,
        routes::leave,
        routes::renew,
        routes::ready,
        routes::drain,
        routes::resume,
        routes::suspect,
        tickets::issue,
        tickets::revoke,
    )
)]
struct Document;

fn document() -> Value {
    // A document of strings and numbers always becomes JSON.
    let mut document = serde_json::to_value(Document::openapi()).unwrap_or_default();
    state_unsigned(&mut document);
    document["components"]["securitySchemes"] = json!({
        "bearer_token": { "type": "http", "scheme": "bearer" },
        "client_certificate": {
            "type": "mutualTLS",
            "description": "A certificate of the fleet's certificate authority, if the control plane has one."
        }
    });
    for route in all_routes() {
        let method = route.method.as_str().to_ascii_lowercase();
        let operation = &mut document["paths"][route.path][method];
        describe_checks(operation, route.path, route.rule);
    }
    document
}

/// Adds the roles of an operation, and the responses of requests that its handler never sees.
fn describe_checks(operation: &mut Value, path: &str, rule: Rule) {
    let error = |text: &str| {
        let schema = json!({ "$ref": "#/components/schemas/ApiError" });
        json!({ "description": text, "content": { "application/json": { "schema": schema } } })
    };
    let mut refusals = vec![
        ("408", error("`request_timeout`: the request was not complete in time")),
        ("413", error("`body_too_large`")),
    ];
    let mut limited = error("`rate_limited`: the caller sends too many requests");
    limited["headers"] = json!({
        "Retry-After": { "description": "Seconds to wait", "schema": { "type": "integer" } }
    });
    refusals.push(("429", limited));
    if rule != Rule::Open {
        refusals.push(("401", error("`unauthorized`: no identity, or a wrong or expired one")));
        refusals.push(("403", error("`forbidden`: the caller's role does not allow this")));
        operation["security"] = json!([{ "bearer_token": [] }, { "client_certificate": [] }]);
        let roles: Vec<_> = rule.roles().iter().map(|role| role.name()).collect();
        operation["x-switchyard-roles"] = json!(roles);
        if matches!(rule, Rule::Owner { .. }) {
            operation["x-switchyard-server-changes"] = json!("its own member only");
        }
    }
    if !forward::LOCAL.contains(&path) {
        refusals.push(("503", error("`no_leader`, `shutting_down`")));
    }
    let Some(responses) = operation["responses"].as_object_mut() else { return };
    for (status, response) in refusals {
        responses.entry(status).or_insert(response);
    }
}

/// States the range of unsigned integers: the derived schemas call them signed.
fn state_unsigned(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            let is_unsigned = fields.get("minimum").and_then(Value::as_u64) == Some(0);
            let range = match fields.get("format").and_then(Value::as_str) {
                Some("int64") if is_unsigned => Some(("uint64", u64::MAX)),
                Some("int32") if is_unsigned => Some(("uint32", u64::from(u32::MAX))),
                _ => None,
            };
            if let Some((format, maximum)) = range {
                set_range(fields, format, maximum);
            }
            fields.values_mut().for_each(state_unsigned);
        }
        Value::Array(values) => values.iter_mut().for_each(state_unsigned),
        _ => {}
    }
}

fn set_range(fields: &mut Map<String, Value>, format: &str, maximum: u64) {
    fields.insert("format".to_owned(), json!(format));
    fields.entry("maximum").or_insert(json!(maximum));
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_document_covers_every_route_and_nothing_else() {
        let document = serde_json::to_value(Document::openapi()).unwrap();
        let mut described = BTreeSet::new();
        for (path, methods) in document["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                described.insert((method.to_uppercase(), path.clone()));
                assert!(operation["responses"].as_object().is_some_and(|all| !all.is_empty()));
            }
        }
        let served: BTreeSet<(String, String)> = all_routes()
            .iter()
            .map(|route| (route.method.to_string(), route.path.to_owned()))
            .collect();
        assert_eq!(described, served);
    }

    #[test]
    fn every_operation_states_its_roles_and_refusals() {
        let document = document();
        for route in all_routes() {
            let method = route.method.as_str().to_ascii_lowercase();
            let operation = &document["paths"][route.path][method];
            let name = format!("{} {}", route.method, route.path);
            let roles: Vec<_> = route.rule.roles().iter().map(|role| role.name()).collect();
            let is_open = route.rule == Rule::Open;
            match is_open {
                true => assert_eq!(operation.get("x-switchyard-roles"), None, "{name}"),
                false => assert_eq!(operation["x-switchyard-roles"], json!(roles), "{name}"),
            }
            assert_eq!(operation["security"] == json!([{}]), is_open, "{name}");
            let has = |status: &str| operation["responses"].get(status).is_some();
            assert!(["408", "413", "429"].into_iter().all(has), "{name}");
            assert_eq!(["401", "403"].map(has), [!is_open; 2], "{name}");
            // Every change reads a body, if only to see that it has none.
            assert!(route.method == "GET" || has("400"), "{name}");
            // Changes are for roles that can make them, and never for viewers.
            assert!(route.method == "GET" || !roles.contains(&"viewer"), "{name}");
            assert!(is_open || !roles.is_empty(), "{name}");
        }
        // The list of routes names what is open: nothing else is.
        let open: Vec<_> = all_routes()
            .iter()
            .filter(|route| route.rule == Rule::Open)
            .map(|route| route.path)
            .collect();
        assert_eq!(open, ["/healthz", "/readyz", "/metrics", "/openapi.json"]);
    }

    #[test]
    fn an_incarnation_may_be_any_unsigned_number_of_64_bits() {
        let text = document().to_string();
        let document: Value = serde_json::from_str(&text).unwrap();
        let field =
            &document["components"]["schemas"]["RegisterRequest"]["properties"]["incarnation"];
        assert_eq!(field["maximum"].as_u64(), Some(u64::MAX));
        assert_eq!(field["format"], "uint64");
        assert!(!text.contains("\"format\":\"int64\",\"minimum\":0"));
        let drain = &document["components"]["schemas"]["DrainRequest"];
        assert_eq!(drain["additionalProperties"], false);
    }

    #[test]
    fn every_reference_has_its_schema() {
        let document = document();
        let mut wanted = BTreeSet::new();
        collect_references(&document, &mut wanted);
        assert!(wanted.len() > 10, "{wanted:?}");
        for reference in wanted {
            let pointer = reference.strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{reference} is missing");
        }
    }

    fn collect_references(value: &Value, found: &mut BTreeSet<String>) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    match value.as_str() {
                        Some(text) if name == "$ref" => {
                            found.insert(text.to_owned());
                        }
                        _ => collect_references(value, found),
                    }
                }
            }
            Value::Array(values) => {
                values.iter().for_each(|value| collect_references(value, found));
            }
            _ => {}
        }
    }
}
