//! Import circles between the modules of a crate.
//!
//! At every level of the module tree, the children of a module (each with everything below it) and the module's own file
//! must import one another without a circle. A module's own file may declare and re-export its children, which does not
//! count as an import. Tests are left out.
//!
//! `cargo modules dependencies --acyclic` counts every child that uses its parent as a circle, since its graph has the edge
//! from a parent to its child; `cargo cycles` does not follow `super::`.
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use petgraph::algo::tarjan_scc;
use petgraph::graphmap::DiGraphMap;
use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens as _;
use syn::{Attribute, Item, ItemUse, Meta, UseTree, Visibility};

use crate::files;

type ModulePath = Vec<String>;
/// Imports at one level: importer and imported, and the modules that do it.
type Imports = BTreeMap<(String, String), BTreeSet<String>>;

/// References of a module's file to other modules.
#[derive(Default)]
struct Module {
    children: BTreeSet<String>,
    /// Names that `use` brings into scope, and their paths.
    names: BTreeMap<String, Vec<String>>,
    /// Paths that the code uses: private imports, and paths in expressions, types and macros.
    paths: BTreeSet<Vec<String>>,
}

/// Fails with every circle in the crates below these folders.
pub(crate) fn check(folders: &[PathBuf]) -> Result<()> {
    let mut found = Vec::new();
    for folder in folders {
        let modules = Modules::read(folder)?;
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        found.extend(modules.circles().into_iter().map(|circle| format!("{name}: {circle}")));
    }
    ensure!(found.is_empty(), "modules that import each other in a circle:\n{}", found.join("\n"));
    Ok(())
}

#[derive(Default)]
struct Modules(BTreeMap<ModulePath, Module>);

impl Modules {
    fn read(folder: &Path) -> Result<Self> {
        let mut modules = Self::default();
        let source = folder.join("src");
        let root = ["lib.rs", "main.rs"].into_iter().map(|name| source.join(name)).find(|path| path.exists());
        let root = root.with_context(|| format!("{} has no lib.rs and no main.rs", source.display()))?;
        modules.read_file(&root, &source, ModulePath::new())?;
        Ok(modules)
    }

    fn read_file(&mut self, file: &Path, folder: &Path, path: ModulePath) -> Result<()> {
        let text = files::text(file)?;
        let parsed = syn::parse_file(&text).with_context(|| format!("parsing {}", file.display()))?;
        self.read_items(&parsed.items, folder, path)
    }

    /// `folder` has the files of child modules.
    fn read_items(&mut self, items: &[Item], folder: &Path, path: ModulePath) -> Result<()> {
        let mut module = Module::default();
        for item in items {
            match item {
                Item::Mod(child) if is_test(&child.attrs) => {}
                Item::Mod(child) => {
                    let name = child.ident.to_string();
                    let child_path = [path.as_slice(), std::slice::from_ref(&name)].concat();
                    let below = folder.join(&name);
                    match &child.content {
                        Some((_, items)) => self.read_items(items, &below, child_path)?,
                        None => {
                            let flat = folder.join(format!("{name}.rs"));
                            let file = if flat.exists() { flat } else { below.join("mod.rs") };
                            self.read_file(&file, &below, child_path)?;
                        }
                    }
                    module.children.insert(name);
                }
                Item::Use(import) if !is_test(&import.attrs) => module.add_import(import),
                item => paths_of_tokens(item.to_token_stream(), &mut module.paths),
            }
        }
        self.0.insert(path, module);
        Ok(())
    }

    /// Resolves `path`, as written in `from`, to a module; None if it belongs to another crate.
    fn resolve(&self, from: &[String], path: &[String], depth: usize) -> Option<ModulePath> {
        let mut at = from.to_vec();
        for (position, name) in path.iter().enumerate() {
            let module = &self.0[&at];
            match name.as_str() {
                "crate" => at.clear(),
                "self" => {}
                "super" => drop(at.pop()?),
                name if module.children.contains(name) => at.push(name.to_owned()),
                name => {
                    // A path such as `use x::x` leads back here, hence the depth.
                    let known = module.names.get(name).filter(|_| depth > 0).and_then(|stands_for| {
                        let full = [stands_for.as_slice(), &path[position + 1..]].concat();
                        self.resolve(&at, &full, depth - 1)
                    });
                    return known.or_else(|| (position > 0).then_some(at));
                }
            }
        }
        Some(at)
    }

    /// Every circle, with the imports that make it.
    fn circles(&self) -> Vec<String> {
        let mut levels: BTreeMap<&[String], Imports> = BTreeMap::new();
        for (from, module) in &self.0 {
            // A single name is a local one, or the `crate` of `pub(crate)`.
            for path in module.paths.iter().filter(|path| path.len() > 1) {
                let Some(to) = self.resolve(from, path, 8).filter(|to| to != from) else { continue };
                let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
                let part = |path: &[String]| path.get(common).cloned().unwrap_or_else(|| "mod.rs".to_owned());
                let tie = format!("{} -> {}", shown(from), shown(&to));
                levels
                    .entry(&from[..common])
                    .or_default()
                    .entry((part(from), part(&to)))
                    .or_default()
                    .insert(tie);
            }
        }
        let mut circles = Vec::new();
        for (level, imports) in &levels {
            let graph =
                DiGraphMap::<&str, ()>::from_edges(imports.keys().map(|(a, b)| (a.as_str(), b.as_str())));
            for circle in tarjan_scc(&graph).into_iter().filter(|circle| circle.len() > 1) {
                let inside =
                    |(a, b): &(String, String)| circle.contains(&a.as_str()) && circle.contains(&b.as_str());
                let ties = imports.iter().filter(|(pair, _)| inside(pair)).flat_map(|(_, ties)| ties);
                let ties: Vec<String> = ties.map(|tie| format!("\n    {tie}")).collect();
                circles.push(format!("in {}: {}{}", shown(level), circle.join(", "), ties.concat()));
            }
        }
        circles
    }
}

impl Module {
    fn add_import(&mut self, import: &ItemUse) {
        let mut leaves = Vec::new();
        flatten(&import.tree, &mut Vec::new(), &mut leaves);
        for (path, name) in leaves {
            if name.is_none() || matches!(import.vis, Visibility::Inherited) {
                self.paths.insert(path.clone());
            }
            self.names.extend(name.map(|name| (name, path)));
        }
    }
}

/// Every path of a `use`, with the name that it gets here (None: all names, `*`).
fn flatten(tree: &UseTree, prefix: &mut Vec<String>, into: &mut Vec<(Vec<String>, Option<String>)>) {
    match tree {
        UseTree::Path(path) => {
            prefix.push(path.ident.to_string());
            flatten(&path.tree, prefix, into);
            prefix.pop();
        }
        UseTree::Name(name) if name.ident == "self" => into.push((prefix.clone(), prefix.last().cloned())),
        UseTree::Name(name) => {
            let name = name.ident.to_string();
            into.push(([prefix.as_slice(), std::slice::from_ref(&name)].concat(), Some(name)));
        }
        UseTree::Rename(rename) => {
            let path = match rename.ident == "self" {
                true => prefix.clone(),
                false => [prefix.as_slice(), &[rename.ident.to_string()]].concat(),
            };
            into.push((path, Some(rename.rename.to_string())));
        }
        UseTree::Glob(_) => into.push((prefix.clone(), None)),
        UseTree::Group(group) => group.items.iter().for_each(|tree| flatten(tree, prefix, into)),
    }
}

/// Paths among tokens: names with `::` between them.
fn paths_of_tokens(tokens: TokenStream, into: &mut BTreeSet<Vec<String>>) {
    let mut path: Vec<String> = Vec::new();
    let mut colons = 0;
    for token in tokens {
        let is_colon = matches!(&token, TokenTree::Punct(punct) if punct.as_char() == ':');
        let continues = is_colon || (colons == 2 && matches!(&token, TokenTree::Ident(_)));
        if !continues {
            into.insert(std::mem::take(&mut path));
        }
        colons = if is_colon { colons + 1 } else { 0 };
        match token {
            TokenTree::Ident(name) => path.push(name.to_string()),
            TokenTree::Group(group) => paths_of_tokens(group.stream(), into),
            _ => {}
        }
    }
    into.insert(path);
}

fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::List(list) => list.path.is_ident("cfg") && list.tokens.to_string().starts_with("test"),
        _ => false,
    })
}

fn shown(path: &[String]) -> String {
    if path.is_empty() { "the crate's root".to_owned() } else { path.join("::") }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A crate of `(path, source)` modules, parents after their children.
    fn circles(sources: &[(&str, &str)]) -> Vec<String> {
        let mut modules = Modules::default();
        for (path, source) in sources {
            let path = path.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect();
            let items = syn::parse_file(source).unwrap().items;
            let (children, items): (Vec<_>, Vec<_>) =
                items.into_iter().partition(|item| matches!(item, Item::Mod(_)));
            modules.read_items(&items, Path::new("/nowhere"), ModulePath::clone(&path)).unwrap();
            for child in children {
                if let Item::Mod(child) = child {
                    modules.0.get_mut(&path).unwrap().children.insert(child.ident.to_string());
                }
            }
        }
        modules.circles()
    }

    #[test]
    fn siblings_that_import_each_other_are_a_circle() {
        let found = circles(&[
            ("a", "use super::b::B; struct A;"),
            ("b", "struct B; fn f() -> crate::a::A { todo() }"),
            ("", "mod a; mod b;"),
        ]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("a -> b") && found[0].contains("b -> a"), "{found:?}");
        assert!(circles(&[("a", "use super::b::B;"), ("b", "struct B;"), ("", "mod a; mod b;")]).is_empty());
    }

    #[test]
    fn a_re_exported_name_leads_to_its_own_module() {
        let through_face = [
            ("listener::context", "pub struct Context;"),
            ("listener::serve", "use super::Context;"),
            ("listener", "mod context; mod serve; pub use context::Context; pub use serve::serve;"),
            ("", "pub mod listener;"),
        ];
        assert!(circles(&through_face).is_empty());
        let back = [
            ("a", "use crate::listener::Context;"),
            ("listener::context", "use crate::a::A; pub struct Context;"),
        ];
        let found = circles(&[&back[..], &through_face[1..3], &[("", "mod a; pub mod listener;")]].concat());
        assert_eq!(found.len(), 1, "{found:?}");
    }

    #[test]
    fn a_file_that_calls_its_child_which_uses_its_types_is_a_circle() {
        let found = circles(&[
            ("a::b", "use super::Shape; pub fn draw() {}"),
            ("a", "mod b; pub struct Shape; fn f() { b::draw() }"),
            ("", "mod a;"),
        ]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("in a: "), "{found:?}");
    }

    #[test]
    fn paths_in_macros_and_behind_aliases_count() {
        let found = circles(&[
            ("a", "use crate::b as other; fn f() { other::g() }"),
            ("b", "fn g() { format!(\"{}\", crate::a::f()) }"),
            ("", "mod a; mod b;"),
        ]);
        assert_eq!(found.len(), 1, "{found:?}");
    }
}
