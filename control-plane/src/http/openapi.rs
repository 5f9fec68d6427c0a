//! The OpenAPI document, and its handler.

use axum::Json;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::{Modify, OpenApi};

use super::{digests, routes, tickets, watch};

/// This document.
#[utoipa::path(get, path = "/openapi.json", tag = "probes", security(()),
    responses((status = 200, description = "OpenAPI document", body = Object)))]
pub(super) async fn openapi_json() -> Json<utoipa::openapi::OpenApi> {
    Json(document())
}

fn document() -> utoipa::openapi::OpenApi {
    Document::openapi()
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
        routes::leader,
        routes::status,
        routes::advice,
        routes::events,
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
    ),
    modifiers(&BearerToken),
    security(("bearer_token" = []))
)]
struct Document;

struct BearerToken;

impl Modify for BearerToken {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let components = document.components.get_or_insert_with(Default::default);
        let scheme = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        components.add_security_scheme("bearer_token", scheme);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_document_covers_every_route_and_nothing_else() {
        let document = serde_json::to_value(document()).unwrap();
        let mut described = BTreeSet::new();
        for (path, methods) in document["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                described.insert((method.to_uppercase(), path.clone()));
                assert!(operation["responses"].as_object().is_some_and(|all| !all.is_empty()));
                let is_open = super::super::is_protected(path);
                assert_eq!(operation.get("security").is_none(), is_open, "{method} {path}");
            }
        }
        let served: BTreeSet<(String, String)> = super::super::all_routes()
            .iter()
            .map(|route| (route.method.to_string(), route.path.to_owned()))
            .collect();
        assert_eq!(described, served);
    }

    #[test]
    fn every_reference_has_its_schema() {
        let document = serde_json::to_value(document()).unwrap();
        let mut wanted = BTreeSet::new();
        collect_references(&document, &mut wanted);
        assert!(wanted.len() > 10, "{wanted:?}");
        for reference in wanted {
            let pointer = reference.strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{reference} is missing");
        }
    }

    fn collect_references(value: &serde_json::Value, found: &mut BTreeSet<String>) {
        match value {
            serde_json::Value::Object(fields) => {
                for (name, value) in fields {
                    match value.as_str() {
                        Some(text) if name == "$ref" => {
                            found.insert(text.to_owned());
                        }
                        _ => collect_references(value, found),
                    }
                }
            }
            serde_json::Value::Array(values) => {
                values.iter().for_each(|value| collect_references(value, found));
            }
            _ => {}
        }
    }
}
