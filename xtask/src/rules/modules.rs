//! The modules of one crate, which of them refer to which, and cycles among siblings.

use std::collections::{BTreeMap, BTreeSet};

use super::paths::{Outline, Path};

/// A module's path from the crate's root; the root's is empty.
pub type ModulePath = Vec<String>;

/// The modules of a crate.
#[derive(Default)]
pub struct Modules {
    /// Every module, with the names that it imports and the paths that they stand for.
    modules: BTreeMap<ModulePath, BTreeMap<String, Vec<String>>>,
    references: Vec<Reference>,
}

/// A path in a source file, and the module that it leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    /// The module that names the path.
    pub from: ModulePath,
    /// The module that the path leads to.
    pub to: ModulePath,
    /// File, relative to the workspace.
    pub file: String,
    /// Line in the file, from 1.
    pub line: usize,
}

/// Sibling modules that all refer to each other, directly or through others of them.
#[derive(Debug, PartialEq, Eq)]
pub struct Cycle {
    /// The module that all of them are children of.
    pub parent: ModulePath,
    /// Their names, sorted.
    pub names: Vec<String>,
    /// One reference for every ordered pair that has any.
    pub references: Vec<Reference>,
}

impl Modules {
    /// Reads the outlines of a crate's files: file name, module, outline.
    pub fn new(files: &[(String, ModulePath, Outline)]) -> Self {
        let mut this = Self::default();
        this.modules.insert(Vec::new(), BTreeMap::new());
        for (_, module, outline) in files {
            this.modules.entry(module.clone()).or_default();
            for child in outline.modules.iter().filter(|child| !child.is_test) {
                let path =
                    [module.as_slice(), &child.within, std::slice::from_ref(&child.name)].concat();
                this.modules.entry(path).or_default();
            }
        }
        for (_, module, outline) in files {
            for import in &outline.uses {
                let place = [module.as_slice(), &import.path.within].concat();
                if let Some(imports) = this.modules.get_mut(&place)
                    && import.binding != "*"
                {
                    imports.insert(import.binding.clone(), import.path.segments.clone());
                }
            }
        }
        for (file, module, outline) in files {
            let paths = outline.uses.iter().map(|import| &import.path).chain(&outline.paths);
            let references: Vec<_> =
                paths.filter_map(|path| this.reference(file, module, path)).collect();
            this.references.extend(references);
        }
        this
    }

    /// Every reference from one module to another, except between a module and those above and below it.
    pub fn references(&self) -> &[Reference] {
        &self.references
    }

    /// Whether any module has this name.
    pub fn has(&self, name: &str) -> bool {
        self.modules.keys().any(|path| path.last().is_some_and(|last| last == name))
    }

    /// Cycles among the children of every module.
    pub fn cycles(&self) -> Vec<Cycle> {
        let mut graphs: BTreeMap<ModulePath, BTreeMap<(String, String), &Reference>> =
            BTreeMap::new();
        for reference in &self.references {
            let depth = common(&reference.from, &reference.to);
            let edge = (reference.from[depth].clone(), reference.to[depth].clone());
            let parent = reference.from[..depth].to_vec();
            graphs.entry(parent).or_default().entry(edge).or_insert(reference);
        }
        let mut cycles = Vec::new();
        for (parent, edges) in graphs {
            for names in components(&edges.keys().cloned().collect()) {
                let is_inside =
                    |(from, to): &(String, String)| names.contains(from) && names.contains(to);
                let references = edges
                    .iter()
                    .filter(|(edge, _)| is_inside(edge))
                    .map(|(_, &r)| r.clone())
                    .collect();
                cycles.push(Cycle { parent: parent.clone(), names, references });
            }
        }
        cycles
    }

    fn reference(&self, file: &str, module: &ModulePath, path: &Path) -> Option<Reference> {
        let from = [module.as_slice(), &path.within].concat();
        if !self.modules.contains_key(&from) {
            return None;
        }
        let to = self.resolve(&from, &path.segments, 0)?;
        let depth = common(&from, &to);
        let is_related = depth == from.len() || depth == to.len();
        (!is_related).then(|| Reference { from, to, file: file.to_owned(), line: path.line })
    }

    /// The module that a path leads to, as far as modules go. `None` if it leads out of the crate.
    fn resolve(
        &self,
        from: &ModulePath,
        segments: &[String],
        num_imports: usize,
    ) -> Option<ModulePath> {
        let (first, mut rest) = segments.split_first()?;
        let mut place = match first.as_str() {
            "crate" => Vec::new(),
            "self" => from.clone(),
            "super" => from.split_last()?.1.to_vec(),
            _ => {
                rest = segments;
                from.clone()
            }
        };
        let is_relative = rest.len() == segments.len();
        for (idx, name) in rest.iter().enumerate() {
            if name == "super" {
                place.pop()?;
                continue;
            }
            place.push(name.clone());
            if self.modules.contains_key(&place) {
                continue;
            }
            place.pop();
            // Imports may lead in a circle.
            let import = self.modules.get(&place).and_then(|imports| imports.get(name));
            return match import {
                Some(path) if num_imports < 8 && path != segments => {
                    let path = [path.as_slice(), &rest[idx + 1..]].concat();
                    let target = self.resolve(&place, &path, num_imports + 1);
                    // An import from another crate: the path leads to the module that has it.
                    target.or_else(|| (!(is_relative && idx == 0)).then_some(place))
                }
                _ => (!(is_relative && idx == 0)).then_some(place),
            };
        }
        Some(place)
    }
}

/// How many names two paths begin with in common.
fn common(a: &[String], b: &[String]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Strongly connected components of more than one node, each sorted.
fn components(edges: &BTreeSet<(String, String)>) -> Vec<Vec<String>> {
    let reach = |start: &String, is_forward: bool| {
        let (mut seen, mut open) = (BTreeSet::from([start.clone()]), vec![start.clone()]);
        while let Some(node) = open.pop() {
            for (from, to) in edges {
                let (here, next) = if is_forward { (from, to) } else { (to, from) };
                if *here == node && seen.insert(next.clone()) {
                    open.push(next.clone());
                }
            }
        }
        seen
    };
    let mut found: Vec<Vec<String>> = Vec::new();
    for (node, _) in edges {
        if found.iter().any(|component| component.contains(node)) {
            continue;
        }
        let (ahead, behind) = (reach(node, true), reach(node, false));
        let component: Vec<String> = ahead.intersection(&behind).cloned().collect();
        if component.len() > 1 {
            found.push(component);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::paths::outline;
    use super::*;

    fn crate_of(files: &[(&str, &str)]) -> Modules {
        let files: Vec<_> = files
            .iter()
            .map(|(name, text)| {
                let module = name.split('/').filter(|part| !part.is_empty()).map(str::to_owned);
                (format!("src/{name}.rs"), module.collect(), outline(text))
            })
            .collect();
        Modules::new(&files)
    }

    fn cycles(files: &[(&str, &str)]) -> Vec<String> {
        crate_of(files)
            .cycles()
            .iter()
            .map(|c| format!("{}: {}", c.parent.join("::"), c.names.join(" ")))
            .collect()
    }

    #[test]
    fn a_cycle_of_three_is_found_with_its_lines() {
        let modules = crate_of(&[
            ("", "mod a; mod b; mod c; mod d;"),
            ("a", "use crate::b::X;"),
            ("b", "\nfn f() { super::c::g() }"),
            ("c", "use super::{a::Y, d};"),
            ("d", ""),
        ]);
        let cycles = modules.cycles();
        assert_eq!(cycles.len(), 1);
        assert_eq!(cycles[0].names, ["a", "b", "c"]);
        let lines: Vec<_> =
            cycles[0].references.iter().map(|r| format!("{}:{}", r.file, r.line)).collect();
        assert_eq!(lines, ["src/a.rs:1", "src/b.rs:2", "src/c.rs:1"]);
    }

    #[test]
    fn parents_and_children_may_refer_to_each_other() {
        let files = [
            ("", "mod a; pub use a::X;"),
            ("a", "mod b; use b::Y; use super::Z;"),
            ("a/b", "use super::X; use crate::Z;"),
        ];
        assert!(cycles(&files).is_empty());
    }

    #[test]
    fn an_export_of_the_root_hides_no_cycle() {
        let files =
            [("", "mod a; mod b; pub use a::X;"), ("a", "use crate::b;"), ("b", "use crate::X;")];
        assert_eq!(cycles(&files), [": a b"]);
    }

    #[test]
    fn cycles_below_other_modules_are_found() {
        let files = [
            ("", "mod a;"),
            ("a", "mod b; mod c { use super::b::X; }"),
            ("a/b", "#[cfg(test)] mod tests { use super::super::c::Y; }"),
        ];
        assert!(cycles(&files).is_empty(), "tests do not count");
        let files = [files[0], files[1], ("a/b", "fn f() { crate::a::c::g() }")];
        assert_eq!(cycles(&files), ["a: b c"]);
    }
}
